"""Runs the studies of this repository and writes the pages that show their results.

    python scripts/study.py --list                                      # for every study: which runs are done
    python scripts/study.py replication --data DATA --jobs 12           # train the missing runs, twelve at a time
    python scripts/study.py replication --data DATA --only link --minutes 8
    python scripts/study.py --table --plot                              # the pages in docs/, and their pictures

A study is a file of scripts/studies/ that defines STUDY. Its docstring says which folders DATA must contain; runs
without data are skipped. Each run writes one JSON record. A run that has a record is not trained again.

Runs start in the order of the plan. --minutes sets a time limit: a run starts only if it is expected to finish in time,
judging by finished runs of the same kind, and runs that are still active at the limit are stopped. The same command
continues later. Processes on one GPU take turns unless NVIDIA MPS is running (nvidia-cuda-mps-control -d). Under MPS,
SIGKILL of one process also kills the others: stop this script, or a run, with Ctrl-C or SIGTERM. Do not limit the share
of the GPU per process (CUDA_MPS_ACTIVE_THREAD_PERCENTAGE): with it, some losses were not finite, for unknown reasons.
"""

import sys

from studies.runner import main

from bkn_zoo.cli import ended

if __name__ == "__main__":
    sys.exit(ended("study.py", lambda: main(sys.argv[1:], __doc__)))
