"""The settings tree: YAML files plus dotted overrides, unknown keys refused with the nearest known one.

Every setting of every package has its place here, so that one resolved copy describes a run. Secrets are not settings:
they come from the environment and are never saved. Paths are relative to the working directory.
"""

import datetime as dt
import difflib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args
from urllib.parse import urlsplit

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    field_validator,
    model_validator,
)

from cluster.endpoint.browsing import field_faults, slug_fault
from cluster.failures import SettingsError


class Section(BaseModel):
    """One branch of the tree: frozen, unknown keys refused, defaults checked like any value."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)


class RunSettings(Section):
    """Where a run lives and what makes it repeatable."""

    directory: Path = Path("runs/run")
    seed: int = 0
    max_cost: PositiveFloat | None = None
    """US dollars: no step is started once the run has cost this much, failed attempts included."""
    share: str | None = Field(None, pattern=r"^[1-9]\d*(,[1-9]\d*)*/[1-9]\d*$")
    """Which share of the events this job runs, when several jobs divide them: `2/4` is the second of four, `1,3/4` two of
    them. `pastcast merge` joins the runs."""
    mirror: str | None = None
    """An fsspec address (`file:///…`, `s3://…`) to which records are also shipped while the run goes on."""
    mirror_lag_s: PositiveFloat = 30.0
    """A record is in the mirror at most this long after it was committed, while the mirror can be reached."""
    mirror_records: PositiveInt = 500
    """This many records are shipped at once, without waiting any longer."""

    @field_validator("share")
    @classmethod
    def _within(cls, share: str | None) -> str | None:
        if share is not None:
            numbers, of = share.split("/")
            chosen = [int(n) for n in numbers.split(",")]
            if chosen != sorted(set(chosen)) or chosen[-1] > int(of):
                raise ValueError(f"{share} does not name shares from 1 to {of}, each once and in order")
        return share


class RaySettings(Section):
    """The Ray session. With no address, a running cluster named by RAY_ADDRESS is joined, else a local one is started."""

    address: str | None = None
    cpus: PositiveInt | None = None
    """Cores of a local session; None takes what the machine has."""
    placement_timeout_s: PositiveFloat = 120.0
    worker_cpus: float = 0.1
    """Cores reserved for each rollout worker."""

    @model_validator(mode="after")
    def _one_cluster(self) -> "RaySettings":
        if self.address and self.cpus:
            raise ValueError("cpus sizes a local session, but address names a running cluster; drop one of them")
        return self


class SplitWindow(Section):
    """Whole events that open at or after `start` and close before `end` belong to a split."""

    start: dt.date
    end: dt.date

    @model_validator(mode="after")
    def _ordered(self) -> "SplitWindow":
        if self.end <= self.start:
            raise ValueError(f"the window ends {self.end}, not after its start {self.start}")
        return self


class ScheduleSettings(Section):
    """Forecast dates (Forecast-Dojo A.3)."""

    buffer_days: int = Field(2, ge=0)
    """Days kept free before the close."""
    minimum: PositiveInt = 3
    maximum: PositiveInt = 10
    belief_weight: float = 0.7
    activity_weight: float = 0.3
    recency_weight: float = 1e-3


class FieldMapping(Section):
    """How a foreign row becomes a record: record field → dotted path in the row. Unmapped fields keep their defaults."""

    fields: dict[str, str] = {}
    constants: dict[str, Any] = {}
    """Record field → value given to every row."""
    outcomes: dict[str, str] = {}
    """Raw outcome (as text; booleans are `true` and `false`) → option. Empty: the raw outcome is the option itself."""
    time_zone: str = "UTC"
    """Zone of times without an offset; they are counted."""


class EventsSettings(FieldMapping):
    """The events of a run."""

    path: Path = Path("world/events.jsonl")
    format: Literal["pastcast", "jsonl", "parquet"] = "pastcast"
    """`pastcast`: our own records; the others use the mapping."""
    train: SplitWindow | None = None
    eval: SplitWindow | None = None
    limit: PositiveInt | None = None
    """At most this many events per split, in order of id."""
    schedule: ScheduleSettings = ScheduleSettings()
    deadlines_move: tuple[str, ...] = ()
    """Sources (an event's `source`) that overwrite deadlines when an event ends early: none of theirs is shown."""
    floor: Path | None = None
    """A world's file of best possible forecasts; used by scores only."""


class ArticlesSettings(FieldMapping):
    """The articles an index is built from."""

    path: Path = Path("world/articles.jsonl")
    format: Literal["pastcast", "jsonl", "parquet"] = "pastcast"
    first_year: int = 2010
    """A time of an earlier year, or of one after `last_year`, is no publication time (Forecast-Dojo A.1); see `load_articles`."""
    last_year: int = 2030


Device = Literal["cpu", "cuda"]


class ApproximateSettings(Section):
    """Inverted lists over compressed vectors, for corpora beyond memory."""

    code: Literal["pq", "sq"] = "sq"
    """`sq`: one byte per dimension; `pq`: one byte per four dimensions, which misses more."""
    lists: PositiveInt | None = None
    """Lists of a month; None: four times the root of its rows."""
    probes: PositiveInt = 32
    """Lists that a query looks into: more find more and take longer."""
    rescored: PositiveInt = 4
    """Rows that are scored exactly, per row asked for."""


class IndexSettings(Section):
    """The index on disk."""

    directory: Path = Path("index")
    source: str | None = None
    """An fsspec address (`s3://…`, `file:///…`) of a finished index: every node fetches what it serves, once, into `directory`, and
    checks it by hash."""
    kind: Literal["exact", "exact-bf16", "approximate"] = "exact"
    """`exact-bf16` gives the same answers as `exact` at half the memory traffic, for half as much disk again; `approximate` misses rows."""
    approximate: ApproximateSettings = ApproximateSettings()
    encoder: str = "minilm"
    """A prepared encoder's name, a sentence-transformers folder, or `hashing` (lexical, needs no model); `encoder` says how it is run."""
    batch_size: PositiveInt = 64
    text_characters: PositiveInt = 1000
    """How much of title, summary and text together is encoded; the encoder may read less."""
    lexical: bool = True
    """Whether the words of the articles are indexed too, for `search.mode` lexical and hybrid."""


class SearchSettings(Section):
    """How a search ranks what its cutoff admits."""

    mode: Literal["dense", "lexical", "hybrid"] = "dense"
    """`dense`: by the encoder's vectors; `lexical`: by BM25, without an encoder, and only articles that share a word with the
    query; `hybrid`: both rankings, fused by reciprocal rank."""
    candidates: int = Field(10, ge=1, le=1000)
    """Articles of each ranking that `hybrid` fuses, or as many as are asked for if that is more (Forecast-Dojo A.2: 10)."""


class RetrievalSettings(Section):
    """How the index is served and what a search shows."""

    shard_actors: PositiveInt = 2
    """Groups among which the months are dealt, each served by an actor."""
    replicas: PositiveInt = 1
    """Actors for each group, on different nodes where there are several: more queries at once, and none waits for a restart."""
    batch: PositiveInt = 64
    """Most queries that an actor searches together."""
    linger_s: NonNegativeFloat = 0.003
    """How long an actor waits, at most, for the callers of its last batch to ask again before it starts the next."""
    queue: PositiveInt = 256
    """Most queries in an actor's queue, of all workers together; further ones wait where they come from."""
    actor_cpus: float = Field(0.1, ge=0)
    """Cores per shard actor and for the encoder, if there is one; Ray gives each as many threads, at least one."""
    device: Device = "cpu"
    """Where a shard's vectors are scanned; answers are the same."""
    actor_gpus: float = Field(0.0, ge=0)
    """GPUs per shard actor, for `device: cuda`."""
    restarts: int = Field(3, ge=0)
    """How often a dead actor is started again in one run."""
    start_timeout_s: PositiveFloat = 300.0
    request_timeout_s: PositiveFloat = 120.0
    """How long a search may take, waiting for a restart included, before the attempt is given up."""
    silence_s: PositiveFloat = 30.0
    """A replica that leaves a call unanswered for so long is taken for lost where another one can answer."""
    default_top_k: PositiveInt = 5
    maximum_top_k: PositiveInt = 20
    snippet_characters: PositiveInt = 280
    cutoff_lag_days: int = Field(0, ge=0)
    """Cutoff χ = τ − this. 0 is the Dojo convention (the forecast date's own news is visible), 1 the day before."""
    first_day: dt.date | None = None
    """Articles of earlier days are never shown, and no forecast is dated before one could be."""


class ModelSettings(Section):
    """What answers."""

    kind: Literal["vllm", "endpoint", "uniform", "market", "reader"] = "vllm"
    name: str = ""
    """The name in keys and reports; by default the path's last part, the endpoint's model or the kind."""
    path: str = "smollm2-135m"
    """A prepared model's name or a folder that vLLM can load."""
    adapter: Path | None = None
    """A LoRA adapter's folder: forecasts are sampled with it over the weights at `path`."""
    chat: Literal["auto", "template", "hermes"] = "auto"
    """`template`: the tokenizer's own; `hermes`: ours; `auto`: its own where it renders tools and appends, else ours."""
    transcript: Literal["exact", "rendered"] = "exact"
    """`exact`: every turn only appends to the ids before it. `rendered`: the chat template writes the whole chat anew each
    turn, for templates that cannot append; marked in every record and never trained on token by token."""
    tool_parser: str = "auto"
    """A tool-call parser of vLLM by its registered name; `auto`: that of the chat template's family."""
    reasoning_parser: str = "auto"
    """A reasoning parser of vLLM by its registered name, or empty for models without reasoning; `auto`: the family's."""
    reader_searches: PositiveInt = 1
    reader_top_k: PositiveInt = 4
    reader_scrapes: int = Field(0, ge=0)
    """Articles the rule-based reader opens in full before it computes."""

    @property
    def label(self) -> str:
        """The name in keys and reports."""
        if self.name or self.kind != "vllm":
            return self.name or self.kind
        return self.adapter.name if self.adapter else Path(self.path).name

    @model_validator(mode="after")
    def _adapter_has_a_base(self) -> "ModelSettings":
        if self.adapter and self.kind != "vllm":
            raise ValueError(f"adapter is for kind vllm, not {self.kind}; drop one of them")
        return self


ENGINE_OPTIONS_OF_OURS = {
    "model": "model.path",
    "dtype": "engine.dtype",
    "max_model_len": "engine.max_model_len",
    "seed": "run.seed",
    "tensor_parallel_size": "engine.tensor_parallel",
    "pipeline_parallel_size": "engine.pipeline_parallel",
    "distributed_executor_backend": "engine.nodes",
    "enable_lora": "engine.adapters",
    "max_loras": "engine.adapters",
    "max_cpu_loras": "engine.adapters",
    "max_lora_rank": "engine.adapter_rank",
}
"""Arguments of vLLM that a setting decides: giving them in `engine.options` too would leave two words for one thing."""


class ConcurrencySettings(Section):
    """Steps in flight for each engine that serves; the pool adapts the number between these bounds to its figures."""

    start: PositiveInt = 64
    minimum: PositiveInt = 4
    maximum: PositiveInt = 1024

    @model_validator(mode="after")
    def _ordered(self) -> "ConcurrencySettings":
        if not self.minimum <= self.start <= self.maximum:
            raise ValueError(f"minimum {self.minimum} ≤ start {self.start} ≤ maximum {self.maximum} does not hold")
        return self


class PriceSettings(Section):
    """US dollars per million tokens."""

    input: NonNegativeFloat
    cached: NonNegativeFloat | None = None
    """Of input tokens that the server read from its cache; None: like any other."""
    output: NonNegativeFloat


class ServerSettings(Section):
    """An OpenAI-compatible server: where it is and how it may be asked. API keys stand in the environment, here only the names of
    their variables."""

    base_url: str = ""
    """Up to and without `/chat/completions` or `/embeddings`: `https://api.example.com/v1`."""
    key_env: tuple[str, ...] = ()
    """Environment variables that hold API keys, each one key or several with commas between; empty: none is asked for."""
    parallel: PositiveInt = 32
    """Requests in flight at once."""
    requests_per_minute: PositiveInt | None = None
    tokens_per_minute: PositiveInt | None = None
    """Input and output together; a request counts with an estimate until its true size is known."""
    connect_timeout_s: PositiveFloat = 10.0
    call_timeout_s: PositiveFloat = 900.0
    """From sending to the end of the answer."""
    key_cooldown_s: PositiveFloat = 60.0
    """How long one of several keys rests after it was limited, where the server does not say (OracleProto, Table 14)."""
    longest_retry_after_s: PositiveFloat = 900.0
    """A server that asks for a longer rest stops the run, to be resumed later."""
    network_backoff_s: tuple[NonNegativeFloat, ...] = (2, 5, 15, 30, 60)
    """Waits before trying a call again after a failed connection; as many tries as entries (OracleProto, Table 20)."""
    rate_limit_backoff_s: tuple[NonNegativeFloat, ...] = (10, 30, 60, 120, 300)
    server_backoff_s: tuple[NonNegativeFloat, ...] = (5, 15, 30, 60, 120)

    @field_validator("base_url")
    @classmethod
    def _plain_address(cls, value: str) -> str:
        parts = urlsplit(value)
        if value and (parts.scheme not in ("http", "https") or not parts.hostname):
            raise ValueError("must be a whole address, such as https://api.example.com/v1")
        if parts.username or parts.password or parts.query or parts.fragment:
            raise ValueError(
                "must hold no user, password or query; a key belongs into the environment, see endpoint.key_env"
            )
        if parts.path.rstrip("/").endswith(("/completions", "/embeddings")):
            raise ValueError("must end before /chat/completions or /embeddings")
        return value.rstrip("/")

    @field_validator("key_env")
    @classmethod
    def _names_of_variables(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if not all(re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]{0,63}", name) for name in value):
            raise ValueError("must be names of environment variables, never keys: settings are saved with the run")
        return value


class EndpointSettings(ServerSettings):
    """The server that answers where `model.kind` is `endpoint`. Limits hold for the whole run, whatever the number of its workers."""

    model: str = ""
    """The model's name at that server."""
    price: PriceSettings | None = None
    """None: not known, and no cost is counted."""
    tools: Literal["choice-none", "omitted"] = "choice-none"
    """How tools are withdrawn: still listed with `tool_choice: none`, or left out of the request."""
    stream: bool = True
    """Whether answers are streamed, so that a silent server is noticed early."""
    send_sampling: bool = True
    """Whether temperature, top_p and top_k are sent; some reasoning models refuse them."""
    max_tokens_field: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"
    context_tokens: PositiveInt | None = None
    """The model's context, by which tools are withdrawn and results are cut in time; None: only the server says when it is full."""
    reasoning_field: Literal["", "reasoning_content", "reasoning"] = ""
    """Field in which the model's reasoning in earlier turns of a step is sent back to it; empty: it is not."""
    date_variable: str = ""
    """A variable of the server's chat template that holds today's date (Llama 3: `date_string`): set to the forecast date."""
    extra_body: dict[str, Any] = {}
    """More fields of the request, such as `reasoning_effort`."""
    first_token_timeout_s: PositiveFloat = 240.0
    """From sending to the first part of the answer; without streaming, to the whole answer."""
    chunk_timeout_s: PositiveFloat = 60.0
    """Between two parts of a streamed answer."""

    @field_validator("model")
    @classmethod
    def _browses_not(cls, value: str) -> str:
        if fault := slug_fault(value):
            raise ValueError(fault)
        return value

    @field_validator("extra_body")
    @classmethod
    def _adds_only(cls, value: dict[str, Any]) -> dict[str, Any]:
        if taken := sorted(_BODY_OF_OURS & value.keys()):
            raise ValueError(f"may not hold {', '.join(taken)}: pastcast fills them itself")
        if secret := sorted(name for name in value if name.casefold() in _SECRET_FIELDS):
            raise ValueError(f"may not hold {', '.join(secret)}: settings are saved with the run; see endpoint.key_env")
        if faults := field_faults(value, "extra_body"):
            raise ValueError("; ".join(faults))
        return value


_BODY_OF_OURS = frozenset(
    {
        "model",
        "models",
        "messages",
        "tools",
        "tool_choice",
        "functions",
        "function_call",
        "stream",
        "stream_options",
        "max_tokens",
        "max_completion_tokens",
        "temperature",
        "top_p",
        "top_k",
        "n",
    }
)
_SECRET_FIELDS = frozenset(
    {"api_key", "apikey", "api-key", "key", "authorization", "access_token", "secret", "password"}
)


class PoolingSettings(Section):
    """vLLM's pooling runner as an encoder. `options` go to vLLM's `LLM` unchanged, save what a setting decides."""

    dtype: str = "auto"
    """`auto`: that of the weights."""
    max_model_len: PositiveInt | None = None
    """Tokens of a text that are read; None: what the model's folder says."""
    tensor_parallel: PositiveInt = 1
    """GPUs of one encoder that share every layer."""
    threads: PositiveInt | None = None
    """On CPU only: arithmetic threads; None takes one for each of `encoder.cpus`."""
    kv_cache_gib: PositiveInt = 1
    """On CPU only."""
    environment: dict[str, str] = {}
    options: dict[str, Any] = {}

    @field_validator("options")
    @classmethod
    def _one_word_for_each(cls, value: dict[str, Any]) -> dict[str, Any]:
        taken = {
            "model": "index.encoder",
            "runner": "encoder.kind",
            "tensor_parallel_size": "encoder.vllm.tensor_parallel",
        }
        for option in value:
            ours = taken.get(option, f"encoder.vllm.{option}" if option in cls.model_fields else "")
            if ours:
                raise ValueError(f"options.{option} is decided by {ours}; set that instead")
        return value


class EncoderSettings(Section):
    """How the encoder that `index.encoder` names is run."""

    kind: Literal["local", "vllm", "remote"] = "local"
    """`local`: sentence-transformers; `vllm`: the same folder in vLLM's pooling runner; `remote`: `server` encodes, and
    `index.encoder` is the model's name there."""
    dimension: PositiveInt | None = None
    """Length of a vector, needed for `remote`; a model that gives another is refused. None: the model's."""
    instruction: str = ""
    """What queries are encoded with, and articles never; part of the index's identity. Empty: queries are encoded as they are."""
    query_template: str = "Instruct: {instruction}\nQuery:{query}"
    """How instruction and query become one text; by default as Qwen3-Embedding was trained."""
    cached_queries: int = Field(4096, ge=0)
    """Query vectors that are remembered; the one used longest ago is forgotten first."""
    actors: int = Field(0, ge=0)
    """Encoders of a build, each in an actor of a Ray Data job; 0: the building process encodes itself. `vllm` takes at least one."""
    cpus: float = Field(1.0, ge=0)
    """Cores of one such actor."""
    gpus: float = Field(0.0, ge=0)
    """GPUs of one encoder, in a build and in a run; 0: it computes on the CPU."""
    vllm: PoolingSettings = PoolingSettings()
    server: ServerSettings = ServerSettings()

    @property
    def queries(self) -> str:
        """The template of a query with the instruction in its place; `{query}` stands for the query."""
        return self.query_template.replace("{instruction}", self.instruction) if self.instruction else "{query}"

    @property
    def build_actors(self) -> int:
        """Encoders of a Ray Data job that builds an index; 0: no job."""
        return max(1, self.actors) if self.kind == "vllm" else self.actors

    @model_validator(mode="after")
    def _fits(self) -> "EncoderSettings":
        if self.query_template.count("{query}") != 1 or self.query_template.count("{instruction}") != 1:
            raise ValueError("query_template must hold {instruction} and {query}, each once")
        if "{query}" in self.instruction:
            raise ValueError("instruction may not hold {query}: that is where the query goes")
        if self.kind == "remote":
            if not self.server.base_url or self.dimension is None:
                raise ValueError("kind remote needs server.base_url and dimension")
            if self.actors:
                raise ValueError(
                    "kind remote asks its server from one process, server.parallel requests at once; drop actors"
                )
        if self.vllm.tensor_parallel > 1 and self.gpus != self.vllm.tensor_parallel:
            raise ValueError(f"vllm.tensor_parallel={self.vllm.tensor_parallel} needs as many gpus, not {self.gpus:g}")
        return self


class EngineSettings(Section):
    """The engine pool. `options` go to vLLM's AsyncEngineArgs unchanged."""

    replicas: PositiveInt = 1
    """Engines wanted at the start."""
    minimum: PositiveInt | None = None
    """Serving engines below which no step is started. None: a run begins with all replicas, and one keeps it going."""
    maximum: PositiveInt | None = None
    """Engines at most, on nodes that join during a run. None: as many as `replicas`."""
    cpus: float = Field(1.0, ge=0)
    """Cores of one replica."""
    gpus: float = Field(0.0, ge=0)
    """GPUs of one replica: a fraction or 1, or tensor_parallel × pipeline_parallel; 0: run on the CPU."""
    tensor_parallel: PositiveInt = 1
    """Ranks that share every layer; they lie on one node."""
    pipeline_parallel: PositiveInt = 1
    """Stages that the layers are divided into."""
    nodes: PositiveInt = 1
    """Nodes that one replica is spread over, the same number of stages on each."""
    adapters: int = Field(0, ge=0)
    """LoRA adapters that an engine can hold beside that of `model.adapter`."""
    adapter_rank: Literal[1, 8, 16, 32, 64, 128, 256, 320, 512] = 16
    """The largest LoRA rank that is accepted."""
    threads: PositiveInt | None = None
    """On CPU only: arithmetic threads of a replica; None shares the node's cores among the replicas."""
    dtype: str = "bfloat16"
    max_model_len: PositiveInt = 4096
    kv_cache_gib: PositiveInt = 2
    """On CPU only: memory for the KV cache."""
    restarts: int = Field(3, ge=0)
    """How often a dead replica is started again in one run."""
    start_timeout_s: PositiveFloat = 600.0
    request_timeout_s: PositiveFloat = 600.0
    """How long one model call may take, waiting included, before it is aborted at the engine and repeated elsewhere."""
    drain_timeout_s: PositiveFloat = 300.0
    """How long running requests may still finish on an engine that leaves or changes its weights."""
    pause_timeout_s: PositiveFloat = 3600.0
    """How long a run may be paused for want of engines before it is given up, to be resumed."""
    concurrency: ConcurrencySettings = ConcurrencySettings()
    environment: dict[str, str] = {}
    """Variables for the engines' processes. Those of the launcher about threads, devices, ranks and vLLM are not inherited."""
    options: dict[str, Any] = {}

    @model_validator(mode="after")
    def _elastic(self) -> "EngineSettings":
        if self.minimum and self.minimum > self.replicas:
            raise ValueError(f"minimum {self.minimum} is above replicas {self.replicas}")
        if self.maximum and self.maximum < self.replicas:
            raise ValueError(f"maximum {self.maximum} is below replicas {self.replicas}")
        return self

    @model_validator(mode="after")
    def _one_word_for_each_option(self) -> "EngineSettings":
        for option in self.options:
            if (ours := ENGINE_OPTIONS_OF_OURS.get(option)) is not None:
                raise ValueError(f"options.{option} is decided by {ours}; set that instead")
        return self

    @model_validator(mode="after")
    def _ranks_have_devices(self) -> "EngineSettings":
        ranks = self.tensor_parallel * self.pipeline_parallel
        asked = f"tensor_parallel={self.tensor_parallel} × pipeline_parallel={self.pipeline_parallel}"
        if self.gpus and ranks > 1 and self.gpus != ranks:
            raise ValueError(f"{asked} needs gpus={ranks}, one for each rank, not {self.gpus:g}")
        if ranks == 1 and self.gpus > 1:
            raise ValueError(f"gpus={self.gpus:g}, but {asked} uses one; raise one of them or add replicas")
        if self.pipeline_parallel % self.nodes:
            raise ValueError(
                f"pipeline_parallel={self.pipeline_parallel} stages cannot be spread evenly over nodes={self.nodes}"
            )
        if self.nodes > 1 and not self.gpus:
            raise ValueError(f"nodes={self.nodes} needs GPUs: vLLM on CPU stays on one node")
        return self


class SamplingSettings(Section):
    """How tokens are drawn."""

    temperature: float = Field(1.0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0)
    """0: no restriction."""
    max_tokens: PositiveInt = 1024
    """Per model call; clamped to the room left in the context."""


class BudgetSettings(Section):
    """What one forecast step may spend. A preset fills `iterations` and `calls` where they are not given."""

    preset: Literal["dojo", "dojo-train", "oracleproto"] = "dojo"
    iterations: PositiveInt | None = None
    """Turns in which tools are offered."""
    calls: PositiveInt | None = None
    seconds: PositiveFloat = 3600.0
    answer_turns: PositiveInt = 1
    """Turns without tools in which the report is demanded once the budget is spent or a turn ends without one."""
    tool_output_tokens: PositiveInt = 3_000
    """Longest result of a search or of an opened article; what is cut is said and counted. Models that read messages have
    no tokenizer here: for them, in all three bounds, a token is four characters."""
    python_output_tokens: PositiveInt = 1_000
    """Longest result of the Python tool; its beginning and its end are kept."""
    notebook_tokens: PositiveInt = 5_000
    """Longest notebook that is carried on; a longer one is invalid, and the last valid one is kept."""

    @property
    def resolved(self) -> tuple[int, int]:
        """(iterations, calls)."""
        iterations, calls = {"dojo": (120, 400), "dojo-train": (80, 200), "oracleproto": (6, 4)}[self.preset]
        return self.iterations or iterations, self.calls or calls


class PythonSettings(Section):
    """The Python tool's cell."""

    isolation: Literal["auto", "bubblewrap", "process"] = "auto"
    """`auto`: bubblewrap where it works, else `process` with a warning that says what is weaker."""
    timeout_s: PositiveFloat = 10.0
    memory_mib: PositiveInt = 2048
    output_characters: PositiveInt = 4_000
    """Kept of each of a cell's two outputs; `rollout.budget.python_output_tokens` bounds what a model is shown of them."""
    parallel: PositiveInt = 2
    """Cells at once per worker."""


class DeadlineSettings(Section):
    """How long things may take at the most. Time in which the engine pool is paused does not count for steps and episodes."""

    turn_s: PositiveFloat = 600.0
    """One model call at its engine; past it the request is aborted and the attempt repeated elsewhere. Waiting for an engine
    does not count. The shorter of this and `engine.request_timeout_s` holds; endpoints have `endpoint.call_timeout_s`."""
    step_s: PositiveFloat = 7200.0
    """One attempt at a forecast step; past it the step is abandoned and recorded as `straggler`. `rollout.budget.seconds`
    withdraws the tools long before."""
    episode_s: PositiveFloat = 172_800.0
    """A memory-on episode, from the first step of a sitting; past it its remaining steps are recorded as `episode-deadline`."""


class RolloutSettings(Section):
    """Which episodes run, and how."""

    modes: tuple[Literal["no-tools", "memory-free", "memory-on"], ...] = ("no-tools", "memory-free", "memory-on")
    count: PositiveInt = 1
    """Independent repetitions of each episode."""
    splits: tuple[Literal["train", "eval"], ...] = ("eval",)
    workers: PositiveInt = 1
    concurrency: PositiveInt = 64
    """Steps at once per worker."""
    attempts: PositiveInt = 5
    """Tries of a step that infrastructure failed."""
    deadlines: DeadlineSettings = DeadlineSettings()
    grace_s: float = Field(20.0, ge=0)
    """How long running steps may still finish after Ctrl-C, SIGTERM or the loss of infrastructure."""
    data_failures: int = Field(0, ge=0)
    """Forecasts that may fail for wrong inputs; one more stops the run."""
    bugs: int = Field(20, ge=0)
    """Forecasts that may fail by a bug of pastcast; one more stops the run. Any makes it end with exit status 1."""
    prompt: Literal["full", "compact"] = "full"
    parse: Literal["strict", "lenient"] = "strict"
    """Which policy decides whether a report is usable (both are recorded)."""
    check_share: float = Field(0.02, ge=0, le=1)
    """Share of the finished steps whose transcript is checked once more against what the model was sent and said."""
    budget: BudgetSettings = BudgetSettings()
    python: PythonSettings = PythonSettings()


class ScoreSettings(Section):
    """Intervals."""

    draws: PositiveInt = 4000
    seed: int = 0
    level: float = Field(0.95, gt=0, lt=1)


class TrainingSettings(Section):
    """Supervised fine-tuning on trajectories."""

    base: str = "smollm2-135m"
    output: Path = Path("checkpoints/sft")
    modes: tuple[Literal["no-tools", "memory-free", "memory-on"], ...] = ("memory-free",)
    maximum_brier: float | None = None
    """Only trajectories whose forecast scores at most this."""
    limit: PositiveInt | None = None
    max_length: PositiveInt = 4096
    """Longer rows are dropped and counted, never cut."""
    epochs: PositiveFloat = 1.0
    learning_rate: PositiveFloat = 2e-4
    batch_size: PositiveInt = 4
    gradient_accumulation: PositiveInt = 1
    lora_rank: int = Field(0, ge=0)
    """0: all weights."""
    threads: PositiveInt | None = None
    """Cores of the trainer; None takes those that are free on a node."""
    gpus: float = Field(0.0, ge=0)
    """GPUs of the trainer, and of the engine that proves the checkpoint; 0: train on the CPU."""
    seed: int = 0


class Settings(Section):
    """Everything a run depends on."""

    run: RunSettings = RunSettings()
    ray: RaySettings = RaySettings()
    events: EventsSettings = EventsSettings()
    articles: ArticlesSettings = ArticlesSettings()
    index: IndexSettings = IndexSettings()
    encoder: EncoderSettings = EncoderSettings()
    retrieval: RetrievalSettings = RetrievalSettings()
    search: SearchSettings = SearchSettings()
    model: ModelSettings = ModelSettings()
    engine: EngineSettings = EngineSettings()
    endpoint: EndpointSettings = EndpointSettings()
    sampling: SamplingSettings = SamplingSettings()
    rollout: RolloutSettings = RolloutSettings()
    scores: ScoreSettings = ScoreSettings()
    training: TrainingSettings = TrainingSettings()

    @model_validator(mode="after")
    def _endpoint_named(self) -> "Settings":
        if self.model.kind != "endpoint":
            return self
        for name in ("base_url", "model"):
            if not getattr(self.endpoint, name):
                raise ValueError(f"model.kind is endpoint, so endpoint.{name} must be set")
        if self.run.max_cost is not None and self.endpoint.price is None:
            raise ValueError("run.max_cost needs endpoint.price, or no cost would ever be counted")
        return self

    @property
    def label(self) -> str:
        """The model's name in keys and reports."""
        if self.model.kind == "endpoint":
            return self.model.name or self.endpoint.model
        return self.model.label


def load_settings(files: Sequence[Path] = (), overrides: Sequence[str] = ()) -> Settings:
    """Settings from YAML files (later ones win, key by key) and `dotted.key=value` overrides (values are YAML).

    Raises SettingsError that names the file or override, the key, and the nearest known key.
    """
    tree: dict[str, Any] = {}
    for file in files:
        try:
            loaded = yaml.safe_load(file.read_text())
        except OSError as error:
            raise SettingsError(f"settings file {file}: {error.strerror}; check --config") from error
        except yaml.YAMLError as error:
            raise SettingsError(f"settings file {file} is not YAML: {error}") from error
        if loaded is None:
            continue
        if not isinstance(loaded, dict):
            raise SettingsError(
                f"settings file {file}: the top level must be a mapping of sections, not {type(loaded).__name__}"
            )
        _refuse_unknown(Settings, loaded, f"settings file {file}")
        _merge(tree, loaded)
    for override in overrides:
        key, equals, raw = override.partition("=")
        if not equals or not key:
            raise SettingsError(f"--set {override!r} is not of the form dotted.key=value")
        try:
            value = yaml.safe_load(raw)
        except yaml.YAMLError as error:
            raise SettingsError(f"--set {override!r}: the value is not YAML: {error}") from error
        branch: Any = value
        for part in reversed(key.split(".")):
            branch = {part: branch}
        _refuse_unknown(Settings, branch, f"--set {override!r}")
        _merge(tree, branch)
    try:
        return Settings.model_validate(tree)
    except ValidationError as error:
        raise SettingsError("settings are wrong:\n" + "\n".join(_readable(error))) from error


def dump_settings(settings: Settings) -> str:
    """The resolved tree as YAML; loading it gives equal settings."""
    # Escapes keep it independent of the encoding, and unescaped line separators would be read back as spaces.
    return yaml.safe_dump(settings.model_dump(mode="json"), sort_keys=False, allow_unicode=False)


_UNSHOWN = {
    (*where, name) for where in (("endpoint",), ("encoder", "server")) for name in ("base_url", "key_env", "extra_body")
}
"""Settings into which a key may be put by mistake: a message must not repeat it."""


def _readable(error: ValidationError) -> list[str]:
    lines = []
    for e in error.errors():
        where = ".".join(str(p) for p in e["loc"]) or "together"
        # A whole section tells nothing, and may hold what must not be shown.
        hidden = e["loc"][:2] in _UNSHOWN or e["loc"][:3] in _UNSHOWN
        got = "" if isinstance(e["input"], Section | dict) or hidden else f" (got {e['input']!r})"
        lines.append(f"  {where}: {e['msg']}{got}")
    return lines


def _merge(into: dict[str, Any], other: Mapping[str, Any]) -> None:
    for key, value in other.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = value


def _section_of(annotation: Any) -> type[Section] | None:
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    return next((s for a in get_args(annotation) if (s := _section_of(a))), None)


def _refuse_unknown(section: type[Section], tree: Mapping[str, Any], where: str, prefix: str = "") -> None:
    for key, value in tree.items():
        field = section.model_fields.get(str(key))
        if field is None:
            raise SettingsError(f"{where}: unknown key {prefix}{key}; {_nearest(section, str(key), prefix)}")
        inner = _section_of(field.annotation)
        if inner is not None and isinstance(value, dict):
            _refuse_unknown(inner, value, where, f"{prefix}{key}.")


def _nearest(section: type[Section], key: str, prefix: str) -> str:
    elsewhere = [p for p in _paths(Settings) if p.rsplit(".", 1)[-1] == key]
    if elsewhere:
        return f"did you mean {elsewhere[0]}?"
    close = difflib.get_close_matches(key, section.model_fields, n=1, cutoff=0.5)
    return f"did you mean {prefix}{close[0]}?" if close else f"known here: {', '.join(section.model_fields)}"


def _paths(section: type[Section], prefix: str = "") -> list[str]:
    found = []
    for key, field in section.model_fields.items():
        found.append(prefix + key)
        if (inner := _section_of(field.annotation)) is not None:
            found.extend(_paths(inner, f"{prefix}{key}."))
    return found
