"""What can be set, by a flag (--queue-length 8) or by its twin in the environment (BKN_ZOO_QUEUE_LENGTH=8)."""

import re
import warnings
from typing import Annotated, Any

from pydantic import Field, SecretStr, ValidationError, field_validator
from pydantic_settings import (
    BaseSettings,
    CliApp,
    EnvSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from bkn_zoo.errors import InputError
from bkn_zoo.inference import ENGINES, PRECISIONS

PREFIX, OLD_PREFIX = "BKN_ZOO_", "BKN_"
"""Of the variables in the environment; the one of 0.1.0 is still read, with a warning."""

Listed = Annotated[list[str], NoDecode]  # given as "a,b", not as JSON


class _OldVariables(EnvSettingsSource):
    def __call__(self) -> dict[str, Any]:
        found = super().__call__()
        for name in map(str.upper, found):
            message = f"{OLD_PREFIX}{name} is now called {PREFIX}{name}: rename it."
            warnings.warn(message, DeprecationWarning, stacklevel=2)
        return found


class Settings(BaseSettings):
    """Settings of the service. A flag wins over the environment."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX, cli_prog_name="bkn-zoo serve", cli_kebab_case=True, cli_avoid_json=True, allow_inf_nan=False
    )

    host: str = Field("127.0.0.1", description="address to listen on; 0.0.0.0 is every one that the machine has")
    port: int = Field(8000, ge=0, le=65535, description="port to listen on; 0 takes a free one")
    root_path: str = Field(
        "", description="path under which a proxy shows the service, such as /bkn, whether or not it passes it on"
    )
    workers: int = Field(
        1,
        ge=1,
        description="processes that share the port and the cores; each has the models and the limits to itself",
    )
    models: Listed = Field(
        [],
        description="checkpoint names, folders or Hub ids (owner/repo@revision) to offer, separated by commas; the "
        "first serves requests that name none; default: all that are bundled",
    )
    loaded_models: int = Field(
        2,
        ge=1,
        description="how many models stay in memory; of those that --models names, so many are loaded at the start and "
        "the others on first use; without --models, only the default is loaded at the start",
    )
    engine: str = Field("auto", description=" or ".join(ENGINES))
    device: str = Field("auto", description="auto, cpu or cuda")
    precision: str = Field("auto", description=f"{' or '.join(PRECISIONS)}; auto is the fastest that the hardware has")
    streams: int = Field(
        1,
        ge=1,
        description="images that OpenVINO runs at once, each on its share of the cores: more a second where many ask, "
        "but each takes longer; on a CPU only",
    )
    max_batch: int = Field(32, ge=1, description="most images in one batch; on a GPU only")
    max_wait_ms: float = Field(4.0, ge=0, description="how long an image waits for others to join it; on a GPU only")
    queue_length: int = Field(64, ge=1, description="most requests that wait for a model; more are refused with 429")
    deadline: float = Field(30.0, gt=0, description="seconds after which a request is given up with 504")
    drain_seconds: float = Field(
        5.0,
        ge=0,
        description="seconds after SIGTERM in which /health/ready says 503 and requests are still served, so that a "
        "balancer sees it in time; a second signal ends them",
    )
    head_seconds: float = Field(10.0, gt=0, description="seconds that the headers of a request may take")
    stall_seconds: float = Field(
        10.0, gt=0, description="seconds that a body may stay silent, or an answer unread, before it is given up"
    )
    idle_seconds: float = Field(75.0, gt=0, description="seconds that a connection stays open between two requests")
    max_connections: int = Field(
        1000, ge=1, description="most connections at once; fewer where the limit of open files is low"
    )
    stay_seconds: float = Field(
        60.0, ge=0, description="seconds that a model which is asked for stays in memory before another takes its place"
    )
    max_bytes: int = Field(10_000_000, ge=1, description="largest body of a request")
    max_pixels: int = Field(50_000_000, ge=1, description="most pixels of an image")
    max_images: int = Field(
        32, ge=1, description="most images of one request; --max-bytes and --max-pixels are for all of them together"
    )
    max_held_bytes: int = Field(
        256_000_000,
        ge=1,
        description="most bytes of bodies in memory at once, of all requests; half of them for unfinished ones",
    )
    usual_images: str = Field(
        "",
        description="folder of images as they should be, 20 or more: if set, answers say how unusual an image is "
        "beside them (drift), at the cost of another pass, in PyTorch",
    )
    api_keys: Annotated[list[SecretStr], NoDecode] = Field(
        [],
        description="if set, /v1 and /models ask for one of these, separated by commas; better set by BKN_ZOO_API_KEYS",
    )
    cors_origins: Listed = Field([], description="origins whose pages may call the service; none by default")

    @classmethod
    def settings_customise_sources(
        cls, settings_cls: type[BaseSettings], init_settings: Any, env_settings: Any, *others: Any, **named: Any
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return init_settings, env_settings, _OldVariables(settings_cls, env_prefix=OLD_PREFIX)

    @field_validator("models", "api_keys", "cors_origins", mode="before")
    @classmethod
    def _split(cls, value: Any) -> Any:
        parts = value if isinstance(value, list) else str(value).split(",")
        return [part.strip() for part in parts for part in str(part).split(",") if part.strip()]

    @field_validator("api_keys", mode="before")
    @classmethod
    def _check_keys(cls, value: Any) -> Any:
        if not str(value).strip(" ,"):
            raise ValueError("it is set, but holds no key: set one, or leave it out")
        if not str(value).isascii():
            raise ValueError("a key of other letters than ASCII's could not be sent in a header: choose another")
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
        choices = {"engine": ENGINES, "precision": PRECISIONS, "device": ("auto", "cpu", "cuda")}
        if value not in choices[info.field_name]:
            raise ValueError(f"choose one of {', '.join(choices[info.field_name])}")
        return value


def _in_one(arguments: list[str]) -> list[str]:
    """With what follows --models as one argument, separated by commas, as shells' patterns do not give it."""
    joined: list[str] = []
    for argument in arguments:
        named = (joined[-1:] and joined[-1].startswith("--models=")) or joined[-2:-1] == ["--models"]
        if named and not argument.startswith("-"):
            joined[-1] += f",{argument}"
        else:
            joined.append(argument)
    return joined


def read_settings(arguments: list[str]) -> Settings:
    """From flags and the environment; raises InputError in one sentence. --model is another name of --models."""
    arguments = _in_one([re.sub(r"^--model(?=$|=)", "--models", argument) for argument in arguments])
    try:
        return CliApp.run(Settings, cli_args=arguments)
    except ValidationError as error:
        first = error.errors()[0]
        name = "-".join(str(part) for part in first["loc"][:1]).replace("_", "-")
        reason = first["msg"].removeprefix("Value error, ")
        raise InputError(f"--{name} (or {PREFIX}{name.replace('-', '_').upper()}): {reason}.") from None
