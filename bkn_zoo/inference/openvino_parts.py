"""An OpenVINO graph cut in two that run one after another, since two can be compiled at the same time."""

from itertools import accumulate
from typing import Any

try:
    import openvino as ov
    from openvino import opset13 as ops
except ImportError:  # an optional extra
    ov = None

LARGE = 2000  # operations and constants, which take OpenVINO about two seconds
WINDOW = 0.3, 0.7  # of the operations: where a cut leaves both parts something to do


def cut(model: Any) -> list[Any]:
    """`model` itself or, if it is large, its two parts; it is used up.

    The second takes the outputs of the first, in their order, then those inputs of `model` that it uses too.
    """
    if len(model.get_ops()) < LARGE:
        return [model]
    nodes = [node for node in model.get_ordered_ops() if node.get_type_name() not in ("Constant", "Result")]
    place = {node.get_name(): number for number, node in enumerate(nodes)}
    # Of every value that is no constant: where it is made, and who uses it from which place on.
    uses: dict[tuple[int, int], list[tuple[int, Any]]] = {}
    for number, node in enumerate(nodes):
        for taken in node.inputs():
            value = taken.get_source_output()
            made = place.get(value.get_node().get_name())
            if made is not None:
                uses.setdefault((made, value.get_index()), []).append((number, taken))
    changes = [0] * (len(nodes) + 1)
    for (made, _), users in uses.items():
        changes[made + 1] += 1
        changes[users[-1][0] + 1] -= 1
    crossing = list(accumulate(changes))  # how many values are made before a place and used there or later
    start, end = (round(share * len(nodes)) for share in WINDOW)
    at = min(range(start, end), key=lambda number: (crossing[number], abs(2 * number - len(nodes))))
    passed, outputs, again = [], [], []
    for (made, index), users in uses.items():
        later = [taken for number, taken in users if number >= at]
        if made >= at or not later:
            continue
        value = nodes[made].output(index)
        parameter = ops.parameter(list(value.shape))
        if nodes[made].get_type_name() == "Parameter":
            parameter.set_friendly_name(nodes[made].get_friendly_name())
            again.append(parameter)
        else:
            passed.append(parameter)
            outputs.append(ops.result(value))
        for taken in later:
            taken.replace_source_output(parameter.output(0))
    return [ov.Model(outputs, model.get_parameters()), ov.Model(model.get_results(), [*passed, *again])]
