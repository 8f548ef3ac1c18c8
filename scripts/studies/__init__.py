"""Our own experiments, and what the pages of docs/ take from their records. Not part of the installed package.

Scripts import it as `studies`: Python puts scripts/ on the path of `python scripts/x.py`, and pytest does so for tests.
"""
