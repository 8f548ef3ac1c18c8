"""The settings of the service, as flags (--queue-length 8) or environment variables (BKN_ZOO_QUEUE_LENGTH=8)."""

import warnings
from typing import Annotated, Any

from pydantic import Field, SecretStr, ValidationError, field_validator
from pydantic_settings import BaseSettings, EnvSettingsSource, NoDecode, PydanticBaseSettingsSource, SettingsConfigDict

from bkn_zoo.errors import InputError
from bkn_zoo.inference import ENGINES, PRECISIONS
from bkn_zoo.terminal import Parser

PREFIX, OLD_PREFIX = "BKN_ZOO_", "BKN_"
"""Prefixes of environment variables. That of 0.1.0 is still read, with a warning."""

Listed = Annotated[list[str], NoDecode]  # given as "a,b", not as JSON

CHOICES = {"engine": ENGINES, "precision": PRECISIONS, "device": ("auto", "cpu", "cuda")}
METAVARS = {name: "{" + ",".join(choices) + "}" for name, choices in CHOICES.items()} | {
    "host": "ADDRESS", "root_path": "PATH", "models": "NAME[,NAME]",
    "api_keys": "KEY[,KEY]", "cors_origins": "ORIGIN[,ORIGIN]",
}  # fmt: skip
"""What --help shows for the values of options that are not numbers."""

LISTS = ("models", "api_keys", "cors_origins")
MODELS = ("--models", "--checkpoint", "--checkpoints", "--model")
DESCRIPTION = f"""\
Classifies images over HTTP, and serves a web page to try it.

Every option is also an environment variable: --queue-length is {PREFIX}QUEUE_LENGTH. An option overrides its variable.
"""


class _OldVariables(EnvSettingsSource):
    def __call__(self) -> dict[str, Any]:
        found = super().__call__()
        for name in map(str.upper, found):
            message = f"{OLD_PREFIX}{name} is now called {PREFIX}{name}: rename it."
            warnings.warn(message, DeprecationWarning, stacklevel=2)
        return found


class Settings(BaseSettings):
    """Settings of the service. A flag overrides the environment."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, allow_inf_nan=False)

    host: str = Field("127.0.0.1", description="address to listen on; 0.0.0.0 listens on all addresses of the machine")
    port: int = Field(8000, ge=0, le=65535, description="port to listen on; 0 chooses a free port")
    root_path: str = Field(
        "",
        description="path under which a proxy serves this service, such as /bkn; the proxy may remove it from requests",
    )
    workers: int = Field(
        1, ge=1, description="processes that share the port and the cores; each has its own models and limits"
    )
    models: Listed = Field(
        [],
        description="checkpoint names, folders or Hub ids (owner/repo@revision) to offer, separated by commas; the "
        "first is the default model (default: all bundled checkpoints)",
    )
    loaded_models: int = Field(
        2,
        ge=1,
        description="number of models in memory; this many of --models are loaded at the start, the others on first "
        "use; without --models, only the default is loaded at the start",
    )
    engine: str = Field("auto", description="what runs the models")
    device: str = Field("auto", description="auto is a GPU if there is one")
    precision: str = Field("auto", description="precision of the models; auto is the fastest of the hardware")
    streams: int = Field(
        1,
        ge=1,
        description="images that OpenVINO runs at once, each on its share of the cores: more images per second with "
        "many clients, but each takes longer; on a CPU only",
    )
    max_batch: int = Field(32, ge=1, description="largest number of images in a batch; on a GPU only")
    max_wait_ms: float = Field(
        4.0, ge=0, description="milliseconds that an image waits for others to form a batch; on a GPU only"
    )
    queue_length: int = Field(
        64, ge=1, description="largest number of requests in the queue of a model; more are refused with 429"
    )
    deadline: float = Field(30.0, gt=0, description="seconds after which a request is aborted with 504")
    drain_seconds: float = Field(
        5.0,
        ge=0,
        description="seconds after SIGTERM in which /health/ready returns 503 and requests are still served, so that a "
        "load balancer can react; a second signal ends them",
    )
    head_seconds: float = Field(10.0, gt=0, description="time limit for the headers of a request, in seconds")
    stall_seconds: float = Field(
        10.0,
        gt=0,
        description="seconds without data of a body, or without reading a response, before a connection is closed",
    )
    idle_seconds: float = Field(75.0, gt=0, description="seconds that a connection stays open between two requests")
    max_connections: int = Field(
        1000, ge=1, description="largest number of connections; fewer if the limit of open files is low"
    )
    stay_seconds: float = Field(
        60.0, ge=0, description="seconds that a model in use stays in memory before another can replace it"
    )
    max_bytes: int = Field(10_000_000, ge=1, description="largest size of a request body, in bytes")
    max_pixels: int = Field(50_000_000, ge=1, description="largest number of pixels of an image")
    max_images: int = Field(
        32,
        ge=1,
        description="largest number of images per request; --max-bytes and --max-pixels apply to all of them together",
    )
    max_held_bytes: int = Field(
        256_000_000,
        ge=1,
        description="largest number of bytes of all request bodies in memory; half of them for unfinished bodies",
    )
    api_keys: Annotated[list[SecretStr], NoDecode] = Field(
        [],
        description="if set, /v1 and /models require one of these keys, separated by commas; prefer BKN_ZOO_API_KEYS",
    )
    cors_origins: Listed = Field([], description="origins whose web pages may call the service; none by default")

    @classmethod
    def settings_customise_sources(
        cls, settings_cls: type[BaseSettings], init_settings: Any, env_settings: Any, *others: Any, **named: Any
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return init_settings, env_settings, _OldVariables(settings_cls, env_prefix=OLD_PREFIX)

    @field_validator(*LISTS, mode="before")
    @classmethod
    def _split(cls, value: Any) -> Any:
        parts = value if isinstance(value, list) else str(value).split(",")
        return [part.strip() for part in parts for part in str(part).split(",") if part.strip()]

    @field_validator("api_keys", mode="before")
    @classmethod
    def _check_keys(cls, value: Any) -> Any:
        if not str(value).strip(" ,"):
            raise ValueError("it is set, but contains no key: set one, or remove it")
        if not str(value).isascii():
            raise ValueError("a key may contain only ASCII characters, because it is sent in a header: choose another")
        return value

    @field_validator("port", mode="before")
    @classmethod
    def _is_not_an_address(cls, value: Any) -> Any:
        if str(value).startswith("tcp://"):
            raise ValueError("Kubernetes set it for a Service of this name: add enableServiceLinks: false to the pod")
        return value

    @field_validator("root_path")
    @classmethod
    def _begin_with_a_slash(cls, value: str) -> str:
        return f"/{value.strip('/')}".rstrip("/")

    @field_validator("engine", "precision", "device")
    @classmethod
    def _known(cls, value: str, info: Any) -> str:
        if value not in CHOICES[info.field_name]:
            raise ValueError(f"choose one of {', '.join(CHOICES[info.field_name])}")
        return value


def settings_parser() -> Parser:
    """The parser of `bkn-zoo serve`: one option per setting. `Settings` checks the values."""
    made = Parser("bkn-zoo serve", usage="bkn-zoo serve [OPTION ...]", description=DESCRIPTION, allow_abbrev=False)
    for name, field in Settings.model_fields.items():
        flags = MODELS[:2] if name == "models" else (f"--{name.replace('_', '-')}",)
        default = f"{field.default:g}" if isinstance(field.default, float) else field.default
        what = f"{field.description}{f' (default: {default})' if default else ''}"
        made.add_argument(*flags, dest=name, action="append", metavar=METAVARS.get(name, "N"), help=what)
    return made


def _in_one(arguments: list[str]) -> list[str]:
    """Join the arguments after --models with commas, because a shell expands patterns to several arguments.

    The other names of --models are replaced by it.
    """
    joined: list[str] = []
    for argument in arguments:
        name, equals, value = argument.partition("=")
        named = (joined[-1:] and joined[-1].startswith("--models=")) or joined[-2:-1] == ["--models"]
        if named and not argument.startswith("-"):
            joined[-1] += f",{argument}"
        else:
            joined.append(f"--models{equals}{value}" if name in MODELS else argument)
    return joined


def read_settings(arguments: list[str]) -> Settings:
    """Read the settings from flags and the environment."""
    flags = vars(settings_parser().read(_in_one(arguments)))
    # Lists may be given in several parts; of all others, the last counts.
    given: dict[str, Any] = {
        name: ",".join(values) if name in LISTS else values[-1] for name, values in flags.items() if values
    }
    try:
        return Settings(**given)
    except ValidationError as error:
        first = error.errors()[0]
        name = "-".join(str(part) for part in first["loc"][:1]).replace("_", "-")
        reason = first["msg"].removeprefix("Value error, ")
        raise InputError(f"--{name} (or {PREFIX}{name.replace('-', '_').upper()}): {reason}.") from None
