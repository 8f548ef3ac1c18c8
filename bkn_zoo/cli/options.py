"""The options of all commands but `train` and `serve`. Nothing here imports PyTorch."""

from pathlib import Path

from bkn_zoo.cli.classify import FORMATS
from bkn_zoo.cli.parser import CHECKPOINT, Parser, add_checkpoint_option, add_device, add_precision, whole_number
from bkn_zoo.inference import ENGINES, PRECISIONS
from bkn_zoo.inference import FORMATS as EXPORT_FORMATS
from bkn_zoo.modes import MODES

SHELLS = ("bash", "zsh", "fish")
NAMED = "a name, a folder or owner/repo on the Hub"
STATISTICS = "statistics that normalize an image (default: the checkpoint's choice)"

CLASSIFY_EXAMPLES = """\
examples:
  bkn-zoo classify cat.jpg dog.png --top-k 3
  bkn-zoo classify photos/ --checkpoint ./my_network --statistics sample --format json
  bkn-zoo classify photos/ --format csv --output out.csv
  bkn-zoo classify photos/ --format csv --output out.csv --ray

A command with --output that was stopped continues when it is repeated: images that are in FILE already are not
classified again. --ray uses all machines of a Ray cluster: see docs/ray.md.

Images that cannot be used are named on stderr at the end. The exit code is 1 if one of them was named in the command,
if no image could be used, or with --strict if any could not; otherwise 0.
"""
COMPARE_EXAMPLES = """\
example:
  bkn-zoo compare photo.jpg --checkpoint inception_v2_bkn.tiny_imagenet

The times are those of the network alone: the median of five runs after a first one that prepares it.
"""
INFO_EXAMPLES = """\
examples:
  bkn-zoo info inception_v2_bkn.tiny_imagenet
  bkn-zoo info inception_v2_bkn.tiny_imagenet --classes
  bkn-zoo info ./my_network --format json
"""
EVALUATE = """\
Measures a checkpoint on a data set, in each statistics mode: top-1 with its 95 % interval, top-5, calibration error.

    bkn-zoo evaluate inception_cifar_bkn.cifar10 CIFAR_FOLDER
    bkn-zoo evaluate inception_cifar_bkn.cifar10 CIFAR_FOLDER --engine openvino      # faster on a CPU
    bkn-zoo evaluate runs/NAME/NAME FOLDER_OF_CLASSES --output accuracy.json --report pictures
    bkn-zoo evaluate runs/NAME/NAME OTHER_FOLDER_OF_CLASSES --split all              # none of it seen before

--output writes the figures to a file, with the command and the machine. --report writes two pictures into a folder:
confusion.png (which classes are confused) and mistakes.png (the most confident wrong answers), in the checkpoint's own
statistics mode unless --statistics leaves that out.
"""
EXPORT = """\
Writes a checkpoint as a file for another runtime, and compares the file's outputs with the checkpoint's.

    bkn-zoo export inception_v2_bkn.tiny_imagenet --format onnx
    bkn-zoo export ./my_network --format openvino --statistics sample --precision f16 --output my_network.xml

An OpenVINO file has its weights beside it, in one that ends in .bin.
"""
PUBLISH = """\
Publishes checkpoints on the Hugging Face Hub, each as NAMESPACE/NAME_OF_THE_FOLDER, in one commit.

    bkn-zoo publish runs/NAME/NAME --namespace me --dry-run                  # show what would change
    bkn-zoo publish runs/NAME/NAME --namespace me
    bkn-zoo publish checkpoints/* --namespace me --tag v1.2.3                # a release

Each folder is validated first: it loads, repeats its golden outputs, and agrees with results/ and with its card, unless
that is the short one of save_pretrained; `bkn_zoo.push_to_hub` publishes a folder with a card of your own. Then the Hub
is asked, which has to answer within seconds; a dry run works without it. What was published is downloaded again into an
empty cache and compared. Publishing twice changes nothing. The token is that of `hf auth login` or of HF_TOKEN.
"""
COMPLETION = """\
Prints a script that completes commands, options, their values and the names of checkpoints.

    source <(bkn-zoo completion bash)                                              # in ~/.bashrc
    source <(bkn-zoo completion zsh)                                               # in ~/.zshrc, after compinit
    bkn-zoo completion fish > ~/.config/fish/completions/bkn-zoo.fish
"""


def classify_parser() -> Parser:
    parser = Parser("bkn-zoo classify", description="Say what is on images.", epilog=CLASSIFY_EXAMPLES)
    parser.add_argument("paths", nargs="+", type=Path, metavar="FILE_OR_FOLDER", help="images, and folders of them")
    _add_classifier(parser)
    parser.add_argument("--statistics", choices=MODES, help=STATISTICS)
    parser.add_argument("--format", choices=FORMATS, default="table", help="default: %(default)s")
    parser.add_argument("--output", type=Path, metavar="FILE", help="for csv or json; continues if the file exists")
    parser.add_argument("--strict", action="store_true", help="exit with 1 if any image could not be used")
    parser.add_argument("--ray", action="store_true", help="use all machines of the Ray cluster that RAY_ADDRESS names")
    return parser


def compare_parser() -> Parser:
    text = "Show the three statistics modes side by side."
    parser = Parser("bkn-zoo compare", description=text, epilog=COMPARE_EXAMPLES)
    parser.add_argument("image", type=Path, metavar="IMAGE", help="an image file")
    _add_classifier(parser)
    return parser


def _add_classifier(parser: Parser) -> None:
    add_checkpoint_option(parser, "--model")
    parser.add_argument("--top-k", type=whole_number(1), default=5, metavar="K", help="labels to show (default: 5)")
    parser.add_argument("--engine", choices=ENGINES, default="auto", help="what runs the network (default: auto)")
    add_precision(parser)
    add_device(parser)


def list_parser() -> Parser:
    text = "List the checkpoints that are here: the default first, then in the order of preference."
    return Parser("bkn-zoo list", description=text)


def info_parser() -> Parser:
    parser = Parser("bkn-zoo info", description="Describe a checkpoint.", epilog=INFO_EXAMPLES)
    parser.add_argument("checkpoint", metavar=CHECKPOINT, help=NAMED)
    parser.add_argument("--classes", action="store_true", help="list its classes, one in a line, and nothing else")
    parser.add_argument("--format", choices=("table", "json"), default="table", help="default: %(default)s")
    return parser


def evaluate_parser() -> Parser:
    parser = Parser("bkn-zoo evaluate", description=EVALUATE)
    parser.add_argument("checkpoint", metavar=CHECKPOINT, help=NAMED)
    parser.add_argument("folder", nargs="?", type=Path, metavar="FOLDER", help="the folder that holds the data set")
    parser.add_argument("--data", type=Path, metavar="FOLDER", help="the same, as an option")
    parser.add_argument("--dataset", help="default: the one that the checkpoint was trained on")
    parser.add_argument(
        "--split", choices=["validation", "test", "all"],
        help="default: the test images or, of a folder without any, the validation images that the training held out; "
        "all is for a folder that the training did not see",
    )  # fmt: skip
    parser.add_argument("--statistics", nargs="+", choices=MODES, default=list(MODES), help="default: all three")
    named, exact = ([name for name in choices if name != "auto"] for choices in (ENGINES, PRECISIONS))  # for the record
    what = "the network as it is, or prepared (default: eager)"
    parser.add_argument("--engine", choices=["eager", *named], default="eager", help=what)
    add_precision(parser, exact, "f32")
    parser.add_argument(
        "--batch-size", "--batch", type=whole_number(1), metavar="N", help="images at a time (default: 500; CPU: 16)"
    )
    add_device(parser)
    add_workers(parser)
    parser.add_argument("--output", type=Path, metavar="FILE", help="JSON, for the figures, command and machine")
    parser.add_argument("--report", type=Path, metavar="FOLDER", help="for pictures of what went wrong")
    return parser


def add_workers(parser: Parser) -> None:
    what = "processes that decode image files (default: 0, this one)"
    parser.add_argument("--workers", type=whole_number(0), default=0, metavar="N", help=what)


def export_parser() -> Parser:
    parser = Parser("bkn-zoo export", description=EXPORT)
    parser.add_argument("checkpoint", metavar=CHECKPOINT, help=NAMED)
    parser.add_argument("--format", choices=EXPORT_FORMATS, required=True, help="the runtime")
    parser.add_argument("--statistics", choices=MODES, help=STATISTICS)
    add_precision(parser, ("f32", "f16"), "f32")
    what = "default: CHECKPOINT.STATISTICS.onnx or .xml in the working directory"
    parser.add_argument("--output", type=Path, metavar="FILE", help=what)
    return parser


def publish_parser() -> Parser:
    parser = Parser("bkn-zoo publish", description=PUBLISH)
    parser.add_argument("checkpoints", nargs="+", metavar=CHECKPOINT, help="a name or a folder")
    parser.add_argument("--namespace", required=True, help="the user or organization to publish under")
    parser.add_argument("--name", help="of the repository, for a single checkpoint (default: the folder's)")
    parser.add_argument("--tag", help="for the commit, as in v1.2.3; a tag that exists is never moved")
    parser.add_argument("--private", action="store_true", help="make repositories that are created private")
    parser.add_argument("--dry-run", action="store_true", help="validate and show what would change; change nothing")
    what = "the folder of the cards' figures (default: results beside the checkpoint or above)"
    parser.add_argument("--results", type=Path, metavar="FOLDER", help=what)
    return parser


def completion_parser() -> Parser:
    parser = Parser("bkn-zoo completion", description=COMPLETION)
    parser.add_argument("shell", choices=SHELLS, help="the shell that will read it")
    return parser
