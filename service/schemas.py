"""The requests and responses of the API, for OpenAPI."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat

Statistics = Literal["population", "sample", "expected"]
# Of one request.
MAX_IMAGES = 32


class Options(BaseModel):
    """Options of a request, in the query, in the form or in the JSON body."""

    model_config = ConfigDict(extra="ignore")

    model: str | None = Field(None, description="one of GET /v1/models; by default the first")
    statistics: Statistics | None = Field(None, description="statistics that normalize the image")
    top_k: int = Field(5, ge=1, le=1000, description="number of labels to return")


class LabelScore(BaseModel):
    label: str
    score: FiniteFloat


class Timing(BaseModel):
    queue: float
    inference: float


class Classified(BaseModel):
    """The response of POST /v1/classify."""

    predictions: list[LabelScore]
    model: str
    revision: str | None
    statistics: Statistics
    engine: str
    uncertain: bool = Field(description="whether the image may show none of the model's classes")
    timing_ms: Timing


class Problem(BaseModel):
    code: str
    message: str


class ErrorBody(BaseModel):
    """An error response."""

    error: Problem


class Several(BaseModel):
    """The response of POST /v1/classify/batch: the result or error of each image, in order."""

    results: list[Classified | ErrorBody]


class Model(BaseModel):
    """One model. The fields after `loaded` are null for a model from the Hub that is not loaded."""

    name: str
    default: bool
    loaded: bool
    architecture: str | None = None
    num_classes: int | None = None
    default_statistics: Statistics | None = None
    statistics_batch_size: int | None = None
    accuracy: dict[str, dict[str, float]] = Field({}, description="in percent, of each statistics mode")
    measured_on: str | None = Field(None, description="images of the accuracy, if not the data set's test images")
    crop: float | None = Field(None, description="central square that the network sees, relative to the shorter side")
    revision: str | None = None
    precision: str | None = Field(None, description="null until it is loaded")


class Models(BaseModel):
    models: list[Model]


class Labels(BaseModel):
    """The names of a model's classes; empty if the checkpoint has none, or is on the Hub and not loaded."""

    model: str
    labels: list[str]


class Health(BaseModel):
    status: Literal["live", "ready", "starting", "draining"]


MODEL_IN_QUERY = {
    "name": "model", "in": "query", "required": False, "schema": {"type": "string"},
    "description": "one of GET /v1/models; by default the first",
}  # fmt: skip


def upload(field: str, form: bool) -> dict[str, Any]:
    """The OpenAPI description of an upload: options in the query; the image, JSON with base64 or a form as its body."""
    base64 = {"type": "string", "contentEncoding": "base64", "description": "the image file, in base64"}
    options = Options.model_json_schema()["properties"]
    query = [
        {"name": name, "in": "query", "required": False, "schema": schema, "description": schema["description"]}
        for name, schema in options.items()
    ]
    inner = {"parameters": {"type": "object", "properties": options}} if not form else options
    binary = {"schema": {"type": "string", "format": "binary"}}
    content: dict[str, Any] = {
        "application/octet-stream": binary,
        "image/*": binary,
        "application/json": {
            "schema": {"type": "object", "required": [field], "properties": {field: base64, **inner}},
            "example": {field: "iVBORw0KGgo...", **({"parameters": {"top_k": 3}} if not form else {"top_k": 3})},
        },
    }
    if form:
        file = {"type": "string", "format": "binary", "description": "the image file"}
        schema = {"type": "object", "required": [field], "properties": {field: file, **options}}
        content["multipart/form-data"] = {"schema": schema}
    return {"parameters": query, "requestBody": {"required": True, "content": content}}


def uploads(field: str) -> dict[str, Any]:
    """The same for several images, in a form or in JSON."""
    body = upload(field, form=True)
    content = body["requestBody"]["content"]
    del content["application/octet-stream"], content["image/*"]
    for part in content.values():
        properties = part["schema"]["properties"]
        properties[field] = {"type": "array", "items": properties[field], "minItems": 1, "maxItems": MAX_IMAGES}
    content["application/json"]["example"][field] = ["iVBORw0KGgo...", "/9j/4AAQ..."]
    return body
