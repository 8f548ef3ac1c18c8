"""Measures BKN against BN.

    python scripts/benchmark.py train          # training steps on a GPU
    python scripts/benchmark.py train-cpu      # training steps on the CPU
    python scripts/benchmark.py infer          # images through the engines
    python scripts/benchmark.py counters       # the same by kind of operation in OpenVINO
    python scripts/benchmark.py watch          # what engines need to notice a changed model
    python scripts/benchmark.py defaults       # checkpoints, from an image file to an answer
    python scripts/benchmark.py classify       # the command on a terminal
    python scripts/benchmark.py serve          # the service under load, beside LitServe
    python scripts/benchmark.py start          # the service's first answer, and its memory
    python scripts/benchmark.py loading        # image files to batches, beside timm's loader and a training step

All contestants stay on the device and take turns, round after round, so that a disturbance meets them all; medians and
spreads are over the rounds, and the ratios are medians of the ratios within a round.
"""

import argparse
import os

from benchmarks import classify, counters, defaults, infer, loading, serve, start, train, watch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    for each in (train, infer, counters, watch, defaults, classify, serve, start, loading):
        each.add(commands)
    args = parser.parse_args()
    os.environ["BKN_ZOO_CACHE"] = "off"  # compile graphs every time; `start` says otherwise
    args.run(args)


if __name__ == "__main__":
    main()
