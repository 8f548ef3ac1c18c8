"""Our own experiments, and the tables and figures of docs/ made from their records. Not part of the installed package.

Scripts import it as `studies`: Python adds scripts/ to the path of `python scripts/x.py`, and pytest does so, too.
"""
