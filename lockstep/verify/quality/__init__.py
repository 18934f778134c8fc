"""Is a changed model still as good as the one that it was made from?

Where things are: `tasks` is the file that says what is asked and what is allowed; `subject` is a
model to ask, in this process or behind HTTP; `divergence` compares next-token distributions on
given texts, by position; `accuracy` counts right answers, task by task; `longform` follows long
answers to their end; `check` runs all of them and is the gate.
"""
