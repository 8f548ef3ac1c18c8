"""Shell completion: a short script for each shell, which calls `bkn-zoo completion -- WORDS`."""

from collections.abc import Callable, Iterable

from bkn_zoo.checkpoints.locate import list_checkpoints
from bkn_zoo.cli import options
from bkn_zoo.cli.parser import CHECKPOINT, Parser
from bkn_zoo.cli.train_options import train_parser

SCRIPTS = {
    "bash": """\
_bkn_zoo() {
    local IFS=$'\\n'
    COMPREPLY=($(compgen -W "$(bkn-zoo completion -- "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null)" \\
        -- "${COMP_WORDS[COMP_CWORD]}"))
}
complete -o default -F _bkn_zoo bkn-zoo
""",
    "zsh": """\
#compdef bkn-zoo
_bkn_zoo() {
    local found=(${(f)"$(bkn-zoo completion -- "${(@)words[2,CURRENT]}" 2>/dev/null)"})
    if (( ${#found} )); then compadd -a found; fi
    _files
}
compdef _bkn_zoo bkn-zoo
""",
    "fish": """\
function __bkn_zoo
    set -l words (commandline -opc)
    bkn-zoo completion -- $words[2..-1] (commandline -ct) 2>/dev/null
end
complete -c bkn-zoo -a '(__bkn_zoo)'
""",
}

PARSERS: dict[str, Callable[[], Parser]] = {
    "classify": options.classify_parser,
    "compare": options.compare_parser,
    "list": options.list_parser,
    "info": options.info_parser,
    "train": train_parser,
    "evaluate": options.evaluate_parser,
    "export": options.export_parser,
    "publish": options.publish_parser,
    "completion": options.completion_parser,
}
SERVE = ("--host", "--port", "--checkpoint", "--engine", "--device", "--precision", "--workers", "--help")
"""The most used options of the service. Its own parser would take half a second to import."""


def script(shell: str) -> str:
    return SCRIPTS[shell]


def candidates(words: list[str]) -> list[str]:
    """Completions of the last word. Empty if it is a file name, which the shell completes itself.

    Args:
        words: the words after `bkn-zoo`, up to the cursor; the last may be empty.
    """
    *before, word = words or [""]
    if not before:
        return _beginning(word, [*PARSERS, "serve", "--help", "--version", "--log-level"])
    if before[0] == "serve":
        return _beginning(word, SERVE) if word.startswith("-") else []
    if before[0] not in PARSERS:
        return []
    parser = PARSERS[before[0]]()
    by_option = parser._option_string_actions
    if word.startswith("-"):
        return _beginning(word, sorted(name for name in by_option if name.startswith("--")))
    action = by_option.get(before[-1])
    if action is None or action.nargs == 0:  # not an option with a value, so a positional argument
        action = next((each for each in parser._actions if not each.option_strings), None)
    if action is None:
        return []
    offered = list_checkpoints() if action.metavar == CHECKPOINT else map(str, action.choices or ())
    return _beginning(word, offered)


def _beginning(word: str, offered: Iterable[str]) -> list[str]:
    return [each for each in offered if each.startswith(word)]
