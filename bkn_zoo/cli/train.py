"""`bkn-zoo train`: from its options to a plan, and from the plan to a checkpoint. The plan is made without PyTorch."""

import argparse
import shlex
import signal
import sys
from typing import TYPE_CHECKING, Any

from bkn_zoo.checkpoints.hub import check_reachable, check_repository
from bkn_zoo.cli.parser import check_folder
from bkn_zoo.cli.train_options import parse_training
from bkn_zoo.errors import HubError
from bkn_zoo.progress import speaks
from bkn_zoo.training.interruption import Stopped, handled
from bkn_zoo.training.plan import TrainingPlan, plan_training

if TYPE_CHECKING:
    from bkn_zoo.training.finish import TrainingResult

UNKNOWN = 20.0
"""If the 95 % interval of an accuracy is wider than this, in percent, the accuracy is practically unknown."""


def run_training(arguments: list[str], prog: str = "bkn-zoo train") -> None:
    args, overrides = parse_training(arguments, prog)
    plan: TrainingPlan | None = None
    found: Stamp = None
    interrupted = ending = False

    def interrupt(*_: Any) -> None:
        nonlocal interrupted
        interrupted = True
        if not ending:
            raise KeyboardInterrupt

    with handled(interrupt, signal.SIGINT):
        try:
            plan = planned(args, overrides)
            plan.introduce()  # before seconds of imports
            found = stamp(plan)
            from bkn_zoo.training import run

            result = run.carry_out(plan)
            if result.record:  # that of the first process
                report(result, plan)
                if args.publish:
                    publish_result(result, plan, args)
        except BaseException as error:
            ending = True  # how to go on is said, if Ctrl-C comes once more or not
            # Libraries make errors of their own of a KeyboardInterrupt that comes while they work.
            if not interrupted and not isinstance(error, KeyboardInterrupt | Stopped):
                raise
            if speaks():
                from bkn_zoo.checkpoints.provenance import launched

                command = shlex.join(launched([*prog.split(), *arguments]))
                print(f"\n{how_to_go_on(error, command, plan, found)}", file=sys.stderr)
            # As a shell reports a process that a signal ended.
            raise SystemExit(128 + (error.number if isinstance(error, Stopped) else signal.SIGINT)) from None


def planned(args: argparse.Namespace, overrides: dict[str, Any]) -> TrainingPlan:
    """From the options; a publication that cannot succeed is refused now, not after hours of training."""
    names = ("name", "output", "results", "device", "resume", "workers", "save_minutes", "license")
    options = {name: getattr(args, name) for name in names}
    plan = plan_training(args.recipe, args.data, overrides, init=args.checkpoint, **options)
    check_folder(args.data)
    if args.publish:
        check_repository(f"{args.publish}/{plan.name}")
        check_reachable(f"{args.publish}/{plan.name}")
    return plan


def report(result: "TrainingResult", plan: TrainingPlan) -> None:
    """Print the accuracy, and where the checkpoint is."""
    from bkn_zoo.training.evaluation import show_top1

    record, folder = result.record, result.folder
    split = record["test_images"]
    for mode, metrics in record["test"].items():
        chosen = ", chosen on the validation images" if mode == record["chosen_statistics"] else ""
        print(f"{split}, {mode}: top-1 {show_top1(metrics)}{chosen}")
    if split == "validation":
        metrics = record["test"][record["chosen_statistics"]]
        few = metrics["top1_high"] - metrics["top1_low"] > UNKNOWN
        about = "they are too few to measure it" if few else "it is slightly optimistic, since choices used them"
        print(f"{plan.data} has no val or test, so the accuracy is that of the validation images: {about}")
    print(f"saved to {folder}; try it with: bkn-zoo serve --checkpoint {shlex.quote(str(folder))}")


def publish_result(result: "TrainingResult", plan: TrainingPlan, args: argparse.Namespace) -> None:
    """Publish the result on the Hub; if that fails, say how to do it later."""
    from bkn_zoo.publishing.publish import publish

    try:
        publish(result.folder, plan.name, args.publish, private=args.private)
    except HubError as error:
        private = ["--private"] if args.private else []
        command = shlex.join(["bkn-zoo", "publish", str(result.folder), "--namespace", args.publish, *private])
        raise type(error)(f"{error} The checkpoint is saved: publish it with {command}") from None


Stamp = tuple[int, int] | None
"""A stamp of a saved state, which changes whenever it is written; None if there is none."""


def stamp(plan: TrainingPlan) -> Stamp:
    from bkn_zoo.training.state import STATE

    try:
        status = (plan.output / STATE).stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns


def how_to_go_on(error: BaseException, command: str, plan: TrainingPlan | None, found: Stamp) -> str:
    """What to do after an interruption; `found` is the stamp of the state from before this training."""
    from bkn_zoo.checkpoints.provenance import machines

    saved = plan and stamp(plan)
    # There is no state, or only that of an earlier training.
    if plan is None or saved is None or (not plan.resume and saved == found):
        return "stopped before the first step: begin again with the same command"
    stopped = "stopped at once, and the last saved state stays"
    what = str(error).partition(";")[0] if isinstance(error, Stopped) else stopped
    if machines() > 1:  # torchrun has further options then
        return (
            f"{what}; continue with the same torchrun command{'' if plan.resume else ' and --resume'}, on each machine"
        )
    return f"{what}; continue with:\n{command}{'' if plan.resume else ' --resume'}"
