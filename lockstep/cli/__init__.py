"""The command line: one file a command, `main.py` puts them together.

Modules here import only typer at their head, so that help comes up at once; a
command imports what it runs. `options.py` has the options that several share.
"""
