"""The settings of the service, as flags (--queue-length 8) or environment variables (BKN_ZOO_QUEUE_LENGTH=8)."""

import os
from typing import Annotated, Any

from pydantic import Field, SecretStr, ValidationError, field_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from bkn_zoo.errors import InputError
from bkn_zoo.inference import ENGINES, PRECISIONS
from bkn_zoo.terminal import Parser

PREFIX = "BKN_ZOO_"
# Settings of version 0.1 that are fixed now.
REMOVED = ("max_wait_ms", "head_seconds", "idle_seconds", "stay_seconds", "max_images")
# Given as "a,b", not as JSON.
Listed = Annotated[list[str], NoDecode]
LISTS = ("models", "api_keys", "cors_origins")
CHOICES = {"engine": ENGINES, "precision": PRECISIONS, "device": ("auto", "cpu", "cuda")}
# What --help shows for the values of options that are not numbers.
METAVARS = {name: "{" + ",".join(choices) + "}" for name, choices in CHOICES.items()} | {
    "host": "ADDRESS", "root_path": "PATH", "models": "NAME", "api_keys": "KEY", "cors_origins": "ORIGIN",
}  # fmt: skip
DESCRIPTION = f"""\
Classifies images over HTTP, and serves a web page to try it.

Every option is also an environment variable: --queue-length is {PREFIX}QUEUE_LENGTH. An option overrides its variable.
"""


class Settings(BaseSettings):
    """Settings of the service. Lists are separated by commas. A flag overrides the environment."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, allow_inf_nan=False)

    host: str = Field("127.0.0.1", description="address to listen on; 0.0.0.0 listens on all addresses of the machine")
    port: int = Field(8000, ge=0, le=65535, description="port to listen on; 0 chooses a free port")
    root_path: str = Field("", description="path under which a proxy serves this service, such as /bkn")
    workers: int = Field(1, ge=1, description="processes that share the port and the cores; each has its own models")
    models: Listed = Field(
        [], description="checkpoint names, folders or Hub ids (owner/repo@revision) to offer (default: all bundled)"
    )
    loaded_models: int = Field(2, ge=1, description="number of models in memory; others are loaded on first use")
    engine: str = Field("auto", description="what runs the models")
    device: str = Field("auto", description="auto is a GPU if there is one")
    precision: str = Field("auto", description="precision of the models; auto is the fastest of the hardware")
    streams: int = Field(1, ge=1, description="images that OpenVINO runs at once, each on its share of the cores")
    max_batch: int = Field(32, ge=1, description="largest number of images in a batch; on a GPU only")
    queue_length: int = Field(64, ge=1, description="largest number of requests in the queue of a model")
    deadline: float = Field(30.0, gt=0, description="seconds after which a request is aborted with 504")
    drain_seconds: float = Field(
        5.0, ge=0, description="seconds after SIGTERM with /health/ready at 503 in which requests are still served"
    )
    stall_seconds: float = Field(
        10.0, gt=0, description="seconds for headers, without data of a body, or without reading a response"
    )
    max_connections: int = Field(1000, ge=1, description="largest number of connections; fewer if ulimit -n is low")
    max_bytes: int = Field(10_000_000, ge=1, description="largest size of a request body, in bytes")
    max_pixels: int = Field(50_000_000, ge=1, description="largest number of pixels of an image")
    max_held_bytes: int = Field(256_000_000, ge=1, description="largest size of all request bodies in memory, in bytes")
    api_keys: Annotated[list[SecretStr], NoDecode] = Field(
        [], description="if set, /v1 and /models require one of these keys; prefer BKN_ZOO_API_KEYS"
    )
    cors_origins: Listed = Field([], description="origins whose web pages may call the service; none by default")

    @field_validator(*LISTS, mode="before")
    @classmethod
    def _split(cls, value: Any) -> Any:
        parts = value if isinstance(value, list) else str(value).split(",")
        return [part.strip() for part in parts for part in str(part).split(",") if part.strip()]

    @field_validator("api_keys", mode="before")
    @classmethod
    def _check_keys(cls, value: Any) -> Any:
        text = ",".join(value) if isinstance(value, list) else str(value)
        if value != [] and not text.strip(" ,"):
            raise ValueError("it is set, but contains no key: set one, or remove it")
        if not text.isascii():
            raise ValueError("a key may contain only ASCII characters, because it is sent in a header: choose another")
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
        aliases = ["--checkpoint", "--checkpoints", "--model"] if name == "models" else []
        default = f"{field.default:g}" if isinstance(field.default, float) else field.default
        about = f"{field.description}{f' (default: {default})' if default else ''}"
        # A shell expands a pattern to several arguments.
        several: dict[str, Any] = {"nargs": "+", "action": "extend"} if name in LISTS else {}
        made.add_argument(
            f"--{name.replace('_', '-')}", *aliases, dest=name, metavar=METAVARS.get(name, "N"), help=about, **several
        )
    return made


def read_settings(arguments: list[str]) -> Settings:
    """Read the settings from flags and the environment."""
    for old in map(str.upper, (*Settings.model_fields, *REMOVED)):
        # Ignoring it could leave a service without its keys.
        if f"BKN_{old}" in os.environ:
            remedy = "remove it" if old.lower() in REMOVED else f"rename it to {PREFIX}{old}"
            raise InputError(f"BKN_{old} is a variable of version 0.1: {remedy}.")
    given = {name: value for name, value in vars(settings_parser().read(arguments)).items() if value is not None}
    try:
        return Settings(**given)
    except ValidationError as error:
        first = error.errors()[0]
        name = "-".join(str(part) for part in first["loc"][:1]).replace("_", "-")
        reason = first["msg"].removeprefix("Value error, ")
        if str(first["input"]).startswith("tcp://"):
            reason += "; Kubernetes sets it for a Service of this name: set enableServiceLinks: false in the pod"
        raise InputError(f"--{name} (or {PREFIX}{name.replace('-', '_').upper()}): {reason}.") from None
