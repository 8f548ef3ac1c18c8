"""Writes a checkpoint as a file for another runtime, which is tried against the checkpoint before it gets its name.

    bkn-zoo export inception_v2_bkn.tiny_imagenet --format onnx
    bkn-zoo export ./my_network --format openvino --statistics sample --precision f16 --output my_network.xml

An OpenVINO file has its weights beside it, in one that ends in .bin.
"""

import argparse
from pathlib import Path

from bkn_zoo.inference import FORMATS
from bkn_zoo.inference.export import PRECISIONS, export
from bkn_zoo.modes import MODES


def main(arguments: list[str], prog: str | None = None) -> None:
    parser = argparse.ArgumentParser(prog, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", metavar="NAME", help="a checkpoint: a name, a folder or owner/repo")
    parser.add_argument("--format", choices=FORMATS, required=True, help="what will run it")
    parser.add_argument("--statistics", choices=MODES, help="what normalizes an image (default: its own choice)")
    parser.add_argument("--precision", choices=PRECISIONS, default="f32", help="of the weights (default: %(default)s)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="default: NAME.STATISTICS.onnx or .xml, here")
    args = parser.parse_args(arguments)
    print(export(args.name, args.output, format=args.format, statistics=args.statistics, precision=args.precision))
