"""Trains what our own studies plan, and writes the pages that show it.

    python scripts/study.py --list                                      # every study: what is done, what is missing
    python scripts/study.py replication --data DATA --jobs 12           # train what is missing, twelve at a time
    python scripts/study.py replication --data DATA --only link --minutes 8
    python scripts/study.py pretrained --data OFFICIAL --pack SMALL     # what a study needs of large data sets
    python scripts/study.py --table --plot                              # the pages in docs/, and their pictures

A study is a file of scripts/studies/ that defines STUDY; its first lines say what DATA has to hold. Runs whose data is
not there are left out. Each run leaves one JSON file, and whatever has one is not trained again.

Runs start in the order of the plan. With --minutes none starts that would not be finished in time, judging by those
that are, and what still runs then is stopped; the same command goes on with the rest. Processes that share a GPU take
turns on it, unless NVIDIA's MPS runs (nvidia-cuda-mps-control -d), under which their kernels run at the same time, but
one that is killed (SIGKILL) takes the others with it: stop this script, or a run, with Ctrl-C or SIGTERM.
"""

import sys

from studies.runner import main

from bkn_zoo.cli import ended

if __name__ == "__main__":
    sys.exit(ended("study.py", lambda: main(sys.argv[1:], __doc__)))
