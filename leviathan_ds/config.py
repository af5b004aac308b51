"""What a run is made of: frozen dataclasses, their checks, and the numbers that follow from them.

Opens no file and imports nothing heavy. `leviathan_ds.recipe` reads these from YAML and the command line;
every other room takes them as arguments. A value that cannot work raises UserError naming the key and the
way out, before any process group or model exists.

Names are Megatron's where it has one. V vocabulary, D hidden size, k coordinates, b base, d seed size,
h heads, κ knots, r rank (the letters of the paper).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from data_prep.errors import UserError

EmbeddingKind = Literal["leviathan", "dense_tied", "dense_untied"]
Precision = Literal["fp32", "bf16"]
Recompute = Literal["none", "selective", "full"]
Verification = Literal["checksums", "sizes"]
WandbMode = Literal["off", "offline", "online"]


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise UserError(message)


def integer_root(value: int, degree: int) -> int:
    """Smallest integer b with b**degree >= value, in exact arithmetic.

    Floats get this wrong: ceil(243 ** (1/5)) is 4 where 3**5 == 243.
    """
    low, high = 1, max(1, value)
    while low < high:
        middle = (low + high) // 2
        if middle**degree >= value:
            high = middle
        else:
            low = middle + 1
    return low


@dataclass(frozen=True)
class GeneratorConfig:
    """Sizes, switches and initial scales of the Leviathan embedding generator (model/generator.py).

    The sizes default to those that reproduce the paper's published parameter count. The paper publishes no
    initialisation: the defaults here are ours, chosen by the comparison in docs/generator.md.
    """

    num_coordinates: int = 3
    """Number of coordinates of a token's index, k."""
    seed_size: int = 128
    """Dimensions of the latent seed, d."""
    num_heads: int = 8
    """Heads, h."""
    num_knots: int = 16
    """Spline knots per dimension, κ."""
    rank: int = 64
    """Modes per head, r."""
    normalize_basis: bool = True
    """Divide the basis by its sum over knots."""
    sigmoid_divisor: float = 2.0
    """The latent point is t = sigmoid(LN(W z) / divisor)."""
    residual: bool = False
    """Add z W_res, the v1-like form (reconstructed)."""
    center_product: bool = True
    """Use M - 1 in the output map: same functions up to one constant vector."""
    codebook_std: float = 1.0
    seed_proj_std: float | None = None
    """None: 1/sqrt(d), which keeps the variance of z."""
    spline_delta_std: float = 0.1
    out_proj_std: float | None = None
    """None: 0.004/sqrt(h), which starts the embeddings at an rms of about 0.03, near a dense table's."""

    def __post_init__(self) -> None:
        for name in ("num_coordinates", "seed_size", "num_heads", "rank"):
            _require(getattr(self, name) >= 1, f"model.generator.{name} must be at least 1")
        _require(self.num_knots >= 3, "model.generator.num_knots must be at least 3 (a quadratic spline)")
        _require(self.sigmoid_divisor > 0, "model.generator.sigmoid_divisor must be positive")
        for name in ("codebook_std", "seed_proj_std", "spline_delta_std", "out_proj_std"):
            value = getattr(self, name)
            _require(value is None or value >= 0, f"model.generator.{name} must not be negative")

    def num_parameters(self, vocab_size: int, hidden_size: int) -> int:
        """k·b·d + h·d² + 2·h·d + h·d·κ·r + h·r·D, and d·D more for the residual."""
        base = integer_root(vocab_size, self.num_coordinates)
        d, h = self.seed_size, self.num_heads
        count = self.num_coordinates * base * d + h * d * d + 2 * h * d
        count += h * d * self.num_knots * self.rank + h * self.rank * hidden_size
        return count + (d * hidden_size if self.residual else 0)


@dataclass(frozen=True)
class ModelConfig:
    """A LLaMA-style decoder and the kind of its input embedding."""

    vocab_size: int | None = None
    """None: the tokenizer's."""
    embedding: EmbeddingKind = "leviathan"
    hidden_size: int = 512
    num_layers: int = 8
    num_attention_heads: int = 8
    num_query_groups: int | None = None
    """None: as many as attention heads."""
    ffn_hidden_size: int | None = None
    """None: 8/3 of the hidden size, rounded up to a multiple of 64."""
    kv_channels: int | None = None
    """None: hidden_size / num_attention_heads."""
    rotary_base: float = 10000.0
    norm_epsilon: float = 1e-5
    init_method_std: float = 0.02
    make_vocab_size_divisible_by: int = 64
    generator: GeneratorConfig = field(default_factory=GeneratorConfig)

    def __post_init__(self) -> None:
        for name in ("hidden_size", "num_layers", "num_attention_heads", "make_vocab_size_divisible_by"):
            _require(getattr(self, name) >= 1, f"model.{name} must be at least 1")
        for name in ("num_query_groups", "ffn_hidden_size", "kv_channels"):
            value = getattr(self, name)
            _require(value is None or value >= 1, f"model.{name} must be at least 1, or null for its default")
        for name in ("rotary_base", "norm_epsilon"):
            _require(getattr(self, name) > 0, f"model.{name} must be positive")
        _require(self.init_method_std >= 0, "model.init_method_std must not be negative")
        _require(self.vocab_size is None or self.vocab_size >= 2, "model.vocab_size must be at least 2")
        _require(
            self.kv_channels is not None or self.hidden_size % self.num_attention_heads == 0,
            f"model.num_attention_heads = {self.num_attention_heads} does not divide model.hidden_size = "
            f"{self.hidden_size}; change one of them or set model.kv_channels",
        )
        _require(self.head_size % 2 == 0, "model.kv_channels must be even (rotary embedding)")
        _require(
            self.num_attention_heads % self.query_groups == 0,
            f"model.num_query_groups = {self.query_groups} must divide model.num_attention_heads = "
            f"{self.num_attention_heads}",
        )

    @property
    def query_groups(self) -> int:
        return self.num_query_groups or self.num_attention_heads

    @property
    def head_size(self) -> int:
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    @property
    def ffn_size(self) -> int:
        return self.ffn_hidden_size or -(-self.hidden_size * 8 // 3 // 64) * 64

    @property
    def vocabulary(self) -> int:
        """The true vocabulary size, once known (see `Recipe.with_vocabulary`)."""
        assert self.vocab_size is not None, "vocab_size is filled from the tokenizer before a model is built"
        return self.vocab_size

    def padded_vocab_size(self, tensor_parallel_size: int) -> int:
        """Rows of the table and the head: a multiple of make_vocab_size_divisible_by × TP."""
        multiple = self.make_vocab_size_divisible_by * tensor_parallel_size
        return -(-self.vocabulary // multiple) * multiple


@dataclass(frozen=True)
class ParallelConfig:
    """How one copy of the model is spread over ranks; the rest of the ranks are data-parallel."""

    tensor_model_parallel_size: int = 1
    sequence_parallel: bool = False
    """Shard activations between the tensor-parallel regions over the sequence."""
    split_distinct_ids: bool = True
    """Each tensor-parallel rank evaluates the generator on its part of the distinct ids; an all-gather follows."""

    def __post_init__(self) -> None:
        tp = self.tensor_model_parallel_size
        _require(tp >= 1, "parallel.tensor_model_parallel_size must be at least 1")
        _require(
            tp > 1 or not self.sequence_parallel,
            "parallel.sequence_parallel needs parallel.tensor_model_parallel_size of 2 or more",
        )


@dataclass(frozen=True)
class DataConfig:
    """Which indexed datasets to read (data_prep's output), and how they are cut into samples."""

    prefixes: tuple[str, ...] = ()
    """Paths without .bin/.idx."""
    weights: tuple[float, ...] = ()
    """One for each prefix; empty: by number of tokens."""
    blend: str | None = None
    """A blend file (YAML: prefixes, weights, validation prefixes), instead of data.prefixes and data.weights."""
    validation_prefixes: tuple[str, ...] = ()
    """Whole datasets to validate on, each a domain of its own; empty: the documents of validation_fraction."""
    sequence_length: int = 512
    """Tokens a sample."""
    validation_fraction: float = 0.02
    """Of the documents, chosen by their index for ever; none where a blend or the recipe names validation data."""
    reset_attention_mask: bool = False
    """Attention stays within a document: no token sees those before the last end-of-document."""
    tokenizer_fingerprint: str | None = None
    """Refuse datasets of any other tokenizer."""
    seed: int = 1234
    """Of the sample order."""
    num_workers: int = 1
    """Loader processes; 0 reads in the training process."""
    index_cache: str | None = None
    """Folder for the sample indices, say where datasets are read-only; null: beside each dataset."""

    def __post_init__(self) -> None:
        _require(self.sequence_length >= 2, "data.sequence_length must be at least 2 tokens")
        _require(0 < self.validation_fraction < 1, "data.validation_fraction must lie strictly between 0 and 1")
        _require(
            not self.weights or len(self.weights) == len(self.prefixes),
            f"data.weights has {len(self.weights)} entries for {len(self.prefixes)} data.prefixes",
        )
        _require(all(weight > 0 for weight in self.weights), "data.weights must all be positive")
        for name in ("prefixes", "weights", "validation_prefixes"):
            _require(
                self.blend is None or not getattr(self, name),
                f"data.blend and data.{name} exclude each other: the blend file names prefixes and weights",
            )
        for name in ("blend", "index_cache"):
            _require(getattr(self, name) != "", f"data.{name} is empty; is a shell variable in it unset?")
        _require(self.num_workers >= 0, "data.num_workers must not be negative")
        _require(0 <= self.seed < 2**32, "data.seed must lie between 0 and 2^32 - 1 (numpy's range)")


@dataclass(frozen=True)
class TrainingConfig:
    """The optimizer's steps: batch, schedule, AdamW, precision, recomputation."""

    train_steps: int = 1000
    micro_batch_size: int = 8
    """Sequences per rank and forward pass."""
    global_batch_size: int = 64
    """Sequences per optimizer step, over all data-parallel ranks."""
    lr: float = 1e-3
    min_lr: float = 1e-4
    warmup_steps: int = 100
    weight_decay: float = 0.1
    decay_generator_vectors: bool = False
    """Weight decay on codebooks and the generator's LayerNorms."""
    generator_lr_scale: float = 1.0
    """Multiplies the learning rate of the generator's parameters."""
    table_lr_scale: float = 1.0
    """Multiplies the learning rate of a dense model's input table, where tied that of the head as well: what
    generator_lr_scale is to a generator, so that a comparison can tune both."""
    head_lr_scale: float = 1.0
    """Multiplies the learning rate of an untied output head; a tied one has its table's."""
    adam_beta1: float = 0.9
    adam_beta2: float = 0.95
    adam_eps: float = 1e-8
    clip_grad: float = 1.0
    """0: no clipping."""
    precision: Precision = "bf16"
    recompute: Recompute = "none"
    compile: bool = False
    """torch.compile the transformer layers; the first step takes half a minute longer."""
    loss_chunk_tokens: int = 1024
    """Tokens whose logits exist at once."""
    seed: int = 1234
    """Of the initial weights."""

    def __post_init__(self) -> None:
        for name in ("train_steps", "micro_batch_size", "global_batch_size", "loss_chunk_tokens"):
            _require(getattr(self, name) >= 1, f"training.{name} must be at least 1")
        _require(self.warmup_steps >= 0, "training.warmup_steps must not be negative")
        _require(
            self.warmup_steps <= self.train_steps,
            f"training.warmup_steps = {self.warmup_steps} exceeds training.train_steps = {self.train_steps}",
        )
        _require(self.lr > 0, "training.lr must be positive")
        _require(0 <= self.min_lr <= self.lr, "training.min_lr must lie between 0 and training.lr, ends included")
        for name in ("weight_decay", "clip_grad", "generator_lr_scale", "table_lr_scale", "head_lr_scale"):
            _require(getattr(self, name) >= 0, f"training.{name} must not be negative")
        for name in ("adam_beta1", "adam_beta2"):
            _require(0 <= getattr(self, name) < 1, f"training.{name} must be at least 0 and below 1")
        _require(self.adam_eps > 0, "training.adam_eps must be positive")


@dataclass(frozen=True)
class RunConfig:
    """What the loop does beside training: logging, validation, checkpoints."""

    log_interval: int = 10
    """Steps."""
    eval_interval: int = 500
    """Steps."""
    eval_samples: int = 512
    """Sequences per validation."""
    save_interval: int = 1000
    """Steps."""
    keep_checkpoints: int = 2
    """The last N."""
    keep_every_steps: int = 0
    """Beside those, checkpoints whose step is a multiple of this stay for ever; 0: none."""
    async_save: bool = True
    """Go on training while a checkpoint is written, from a copy of the state in the host's memory. false: no
    copy, training waits."""
    stop_on_failed_save: bool = False
    """End the run when a checkpoint cannot be written (a full disk). false: say so, go on and try again at the
    next save; a run whose last checkpoint fails ends with an error in any case."""
    verify_checkpoints: Verification = "checksums"
    """What is compared with a checkpoint's manifest before it is loaded. sizes: do not read the files twice."""
    replica_check_interval: int = 100
    """Steps between comparisons of replicated parameters; 0: start only."""
    distributed_timeout_minutes: float = 10.0
    """A collective, or a step, that takes longer ends the job with the place where each rank stands."""
    exit_duration_minutes: float | None = None
    """Save and exit (code 75) when a rank is this old; null: never."""
    wandb: WandbMode = "off"
    wandb_project: str = "leviathan"
    tensorboard: bool = False
    """Write RUN/tensorboard."""
    profile_steps: tuple[int, ...] = ()
    """Steps, counted from 1 as in the log, to trace with torch's profiler into RUN/traces."""

    def __post_init__(self) -> None:
        for name in ("log_interval", "eval_interval", "eval_samples", "save_interval", "keep_checkpoints"):
            _require(getattr(self, name) >= 1, f"run.{name} must be at least 1")
        for name in ("replica_check_interval", "keep_every_steps"):
            _require(getattr(self, name) >= 0, f"run.{name} must not be negative")
        _require(all(step >= 1 for step in self.profile_steps), "run.profile_steps count from 1")
        _require(self.distributed_timeout_minutes > 0, "run.distributed_timeout_minutes must be positive")
        _require(
            self.exit_duration_minutes is None or self.exit_duration_minutes > 0,
            "run.exit_duration_minutes must be positive, or null for no limit",
        )


@dataclass(frozen=True)
class FaultsConfig:
    """What happens at a step that must not count: a loss or gradient that is not finite, or a loss spike.

    Such a step changes neither weights nor moments and is counted; its data are not trained on.
    """

    loss_spike_zscore: float | None = None
    """Skip a step whose loss lies this many standard deviations above the mean of the window; null: never."""
    loss_spike_window: int = 128
    """Steps that counted, to compare with; until there are so many no step is a spike."""
    max_consecutive_skips: int = 10
    """After so many in a row the run rolls back, or ends with a report (code 65)."""
    max_rollbacks: int = 0
    """Times that a run may load its last checkpoint from before such a row and go on with the data after it."""

    def __post_init__(self) -> None:
        zscore = self.loss_spike_zscore
        _require(zscore is None or zscore > 0, "faults.loss_spike_zscore must be positive, or null for never")
        _require(self.loss_spike_window >= 2, "faults.loss_spike_window must be at least 2 steps")
        _require(self.max_consecutive_skips >= 1, "faults.max_consecutive_skips must be at least 1")
        _require(self.max_rollbacks >= 0, "faults.max_rollbacks must not be negative")


@dataclass(frozen=True)
class EvaluationConfig:
    """What a validation measures beside the held-out loss (docs/evaluation.md)."""

    deciles: bool = False
    """The held-out loss by how often the training data hold the token."""
    tasks: tuple[str, ...] = ()
    """Of EleutherAI's harness, or of a folder; needs `pip install leviathan_ds[eval]`."""
    include_path: str | None = None
    """A folder with task files of your own."""
    tasks_interval: int | None = None
    """Steps, a multiple of run.eval_interval; null: at every validation."""
    tasks_limit: int | None = 200
    """Examples of each task; null: all."""

    def __post_init__(self) -> None:
        for name in ("tasks_interval", "tasks_limit"):
            value = getattr(self, name)
            _require(value is None or value >= 1, f"evaluation.{name} must be at least 1, or null")
        _require(all(self.tasks), "evaluation.tasks must be names")


@dataclass(frozen=True)
class Recipe:
    """Everything that defines a run, except DeepSpeed's own JSON and the run directory."""

    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    run: RunConfig = field(default_factory=RunConfig)
    faults: FaultsConfig = field(default_factory=FaultsConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)

    def __post_init__(self) -> None:
        tp = self.parallel.tensor_model_parallel_size
        for name, value in (
            ("num_attention_heads", self.model.num_attention_heads),
            ("num_query_groups", self.model.query_groups),
            ("ffn_hidden_size", self.model.ffn_size),
        ):
            _require(
                value % tp == 0,
                f"parallel.tensor_model_parallel_size = {tp} does not divide model.{name} = {value}; "
                "take a size that divides all of num_attention_heads, num_query_groups and ffn_hidden_size",
            )
        _require(
            not self.parallel.sequence_parallel or self.data.sequence_length % tp == 0,
            f"parallel.sequence_parallel needs data.sequence_length = {self.data.sequence_length} to be a "
            f"multiple of parallel.tensor_model_parallel_size = {tp}",
        )
        beyond = [step for step in self.run.profile_steps if step > self.training.train_steps]
        _require(
            not beyond,
            f"run.profile_steps names step {max(beyond, default=0)}, beyond training.train_steps = "
            f"{self.training.train_steps}",
        )
        interval = self.evaluation.tasks_interval or self.run.eval_interval
        _require(
            interval % self.run.eval_interval == 0,
            f"evaluation.tasks_interval = {interval} must be a multiple of run.eval_interval = "
            f"{self.run.eval_interval}: tasks run at validations",
        )

    def with_vocabulary(self, vocab_size: int) -> Recipe:
        """This recipe with an open `model.vocab_size` filled in.

        Raises UserError when the recipe names a smaller vocabulary than the tokenizer's. A larger one is
        allowed: the paper's 200,376 rows serve a tokenizer of 200,019.
        """
        named = self.model.vocab_size
        _require(
            named is None or named >= vocab_size,
            f"model.vocab_size = {named} is smaller than the tokenizer's {vocab_size}; leave it out or raise it",
        )
        return replace(self, model=replace(self.model, vocab_size=named or vocab_size))

    def gradient_accumulation_steps(self, world_size: int) -> int:
        """Micro-batches per optimizer step on each data-parallel rank.

        Raises UserError naming the data-parallel size and batch sizes that would do.
        """
        tp = self.parallel.tensor_model_parallel_size
        _require(
            world_size % tp == 0,
            f"parallel.tensor_model_parallel_size = {tp} does not divide the number of ranks, {world_size}; "
            f"start a multiple of {tp} ranks",
        )
        data_parallel_size = world_size // tp
        per_pass = self.training.micro_batch_size * data_parallel_size
        batch = self.training.global_batch_size

        def fits(micro_batch_size: int) -> bool:
            return batch % (micro_batch_size * data_parallel_size) == 0

        if batch % per_pass:
            nearest = max(1, round(batch / per_pass))
            choices = sorted({per_pass * max(1, nearest + step) for step in (-1, 0, 1, 2)})[:3]
            micro = [size for size in range(self.training.micro_batch_size, 0, -1) if fits(size)]
            raise UserError(
                f"training.global_batch_size = {batch} is not a multiple of training.micro_batch_size × "
                f"data-parallel size = {self.training.micro_batch_size} × {data_parallel_size} "
                f"({world_size} ranks / TP {tp}); "
                + (f"micro-batch sizes that would do: {', '.join(map(str, micro[:3]))}; " if micro else "")
                + f"global batch sizes that would do, for a new run: {', '.join(map(str, choices))}"
            )
        return batch // per_pass
