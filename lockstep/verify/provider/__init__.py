"""Is a model name at one provider the same thing as at another?

Where things are: `fingerprint` compares next-token distributions; `context` finds out how much of
a long prompt is read; `conformance` calls functions; `template` counts prompt tokens; `sampling`
holds what is drawn against what is reported; `check` runs all of them and `findings` says what
one of them gives back.
"""
