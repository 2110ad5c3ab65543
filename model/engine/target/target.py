"""The target: any transformers causal LM whose layers store keys and values."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property, partial
from itertools import pairwise
from numbers import Integral
from threading import get_ident
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ...devices import (
    Graphs,
    give_back,
    step_clock,
    synchronize,
    torch_threads,
    turns_of,
    without_cudnn,
)
from ...errors import UserError
from ...weights.linear import Copies, Layouts, copies_of, is_narrow
from ..attention.attention import Attending
from ..attention.cache import CachePool, LayerShape, TreeCache
from ..attention.checks import TRIAL_ROOM, check_draft, check_model, check_training, unwrapped
from ..attention.layers import (
    LAST,
    Hidden,
    Masks,
    decoder_layers,
    device_of,
    form_of,
    is_compiled,
    layer_types,
    mode_of,
    probe_layers,
)
from ..attention.sight import ALIGNED, LENGTH, Sight, additive
from ..rule.tree import Draft

if TYPE_CHECKING:
    from .lean_forward import LeanForward

# Bytes of a prompt's logits in memory at a time; more on a GPU, where each part takes about as long
# as a step.
LOGITS_BYTES = 64 << 20
LOGITS_BYTES_GPU = 1 << 30
# tokens that are forwarded again with a draft; more of them get a forward of their own
MAX_PENDING = 16
Read = Callable[[int, Tensor], None]
LEAST_WIDTH = 9  # of a head, for the kernel: Triton multiplies 16 numbers or more, here padded
EXECUTIONS = ("eager", "graph", "static")


class Outputs(NamedTuple):
    logits: Tensor  # (n, V)
    # (n, w H), w hidden states side by side, if the forward was asked for them
    hidden: Tensor | None = None


class Target:
    """A transformers model with two operations on a cache: `prefill`, and `forward` over a draft.

    Threads that share the model, by this target or another one, hold its `turns` for each step.

    Args:
        model: a causal LM, by itself or inside torch.compile's or peft's wrapper.
        context: tokens of prompt and answer together. Default: the model's own limit, at most 4096.
        linear: how linear layers multiply, one of `LAYOUTS` or several (`Layouts`).

    Raises:
        UserError: the engine cannot drive the model; says why (see `checks`).
    """

    lean: LeanForward | None = None  # how drafts are forwarded on a CPU, if faster

    def __init__(
        self, model: Any, *, context: int | None = None, linear: str | Layouts = "torch"
    ) -> None:
        self.model = unwrapped(model)
        self.linear = linear if isinstance(linear, Layouts) else Layouts((linear,))
        # read now, as a thread that starts within another one's step reads 1
        self.threads = torch.get_num_threads()
        self._is_compiled = any(is_compiled(module) for module in self.model.modules())
        without_autocast = torch.autocast(device_of(self.model).type, enabled=False)
        # the layers' own products may be slow
        with self.turns, self._uncompiled(), without_autocast, self.copies.used():
            self._examine(context)

    def _uncompiled(self) -> AbstractContextManager[Any]:
        # drafts have many shapes, and recompilations are limited
        return torch.compiler.set_stance("force_eager") if self._is_compiled else nullcontext()

    def _examine(self, context: int | None) -> None:
        model = self.model
        self.name = model.config.name_or_path or type(model).__name__
        self.context, parameters, self.cache_name = check_model(model, self.name, context)
        self._keeps_logits = "logits_to_keep" in parameters
        self._takes_positions = "position_ids" in parameters
        self.device = device_of(model)
        self.dtype: torch.dtype = (
            torch.float32 if is_narrow(model) else model.get_input_embeddings().weight.dtype
        )
        self.vocab_size: int = model.get_input_embeddings().weight.shape[0]
        self.logits_size: int = model.get_output_embeddings().weight.shape[0]
        self._shapes: list[LayerShape | None] = []
        self._states: list[int] = []
        self._attending = Attending(model)
        # of static steps: see CompiledLayers
        self.kernels: AbstractContextManager[None] = nullcontext()
        values = self.copies.refresh(model)
        # one forward finds what layers store and which share their input
        if self.linear.copy == "fused":
            self.copies.fuse(model, self._probe)
            give_back(self.device)  # memory of the weights before they were joined
        else:
            self._probe()
        self.recurrent = bool(self._states)  # drafts are chains
        stored_on = {shape.device for shape in self._shapes if shape is not None}
        self.devices = sorted({self.device, *stored_on}, key=str)  # layers may be spread
        self.clock = step_clock(self.devices)
        self.caches = CachePool(partial(TreeCache, self._shapes, states=self._states))
        self.attends_by_table = self.device.type == "cpu" and self.can_attend_by_table
        self.graphs = Graphs(self.device)
        self._form = form_of(model)
        self.mode = mode_of(model)
        self.batches = set[str]()  # executions whose trial passed; see `batch.check_batch`
        self.idle_batch: Any = None  # the cache of the last batch; see `batch.Batch`
        if self.device.type == "cpu" and self.linear.auto:
            from .lean_forward import LeanForward  # only now, as it imports numba

            self.lean = LeanForward(self)
            self.lean.try_out(values)
        check_draft(self, TreeCache(self._shapes, TRIAL_ROOM, self._states))

    @cached_property
    def turns(self) -> Any:
        """Lock held for each step by threads that share the model."""
        return turns_of(self.model)

    @cached_property
    def copies(self) -> Copies:
        return copies_of(self.model, self.linear.copy)

    @property
    def changed(self) -> bool:
        """True if the model was resized, moved or cast, or has other layers or attention."""
        return form_of(self.model) != self._form

    def _probe(self) -> None:
        layers = probe_layers(self.model, self.name, self.device, self.cache_name)
        self._shapes, self._windows, self._states = layers
        self._types = layer_types(self.model)
        self._smallest_window = min(
            (window.size for window in self._windows.values()), default=sys.maxsize
        )

    def prepare(self, module: torch.nn.Module) -> None:
        """Make a drafter's linear layers multiply as the target's do, inside `drafting`."""
        self.copies.refresh(module)

    @contextmanager
    def drafting(self) -> Iterator[None]:
        """Within this block a drafter's network runs as the target's forwards do."""
        with without_cudnn(self.device), self.copies.used(), self._in_threads(self.threads):
            yield

    @property
    def layers(self) -> torch.nn.ModuleList:
        """The decoder's layers. Raises UserError if the decoder does not list them."""
        return decoder_layers(self.model, self.name)

    def check_hidden(self, numbers: Hidden) -> None:
        for number in numbers:
            if number != LAST and not 0 <= number < len(self.layers):
                raise UserError(
                    f"{self.name}: has no hidden state {number}; there are 0 to"
                    f" {len(self.layers) - 1} and {LAST}"
                )

    def check_execution(self, name: str) -> str:
        if name not in EXECUTIONS:
            raise UserError(f"execution={name}: there is auto, {', '.join(EXECUTIONS)}")
        if name == "graph" and self.device.type != "cuda":
            raise UserError(f"execution=graph: needs a CUDA device, this model is on {self.device}")
        if name != "eager" and self.no_fixed_shapes:
            raise UserError(
                f"execution={name}: this model {self.no_fixed_shapes}, and its steps have no fixed"
                " shape; use eager or auto"
            )
        return name

    @property
    def no_fixed_shapes(self) -> str:
        """Why steps, and batches, cannot have a fixed shape; "" if they can."""
        if self.recurrent:
            return "keeps recurrent states"
        return f"is on {', '.join(map(str, self.devices))}" if len(self.devices) > 1 else ""

    @property
    def can_attend_by_table(self) -> bool:
        """True if attention may take a `Sight` in place of a mask."""
        by_interface = self._attending.is_sdpa and getattr(
            self.model, "_supports_attention_backend", False
        )
        sparse = any(shape is not None and shape.index_dim for shape in self._shapes)
        return (
            by_interface
            and not self.no_fixed_shapes
            and not sparse
            and self._smallest_window >= self.context
        )

    @property
    def no_kernel(self) -> str:
        """Why the GPU has no kernel for attention by a `Sight`; "" if it has one."""
        if self.device.type != "cuda":
            return ""
        stored = [shape for shape in self._shapes if shape is not None]
        narrowest = min(min(shape.key_dim, shape.value_dim) for shape in stored)
        if narrowest < LEAST_WIDTH:
            return (
                f"heads have {narrowest} numbers, less than the {LEAST_WIDTH} that it can multiply"
            )
        old = torch.cuda.get_device_capability(self.device) < (8, 0)
        return "it is for GPUs of compute capability 8.0 or later" if old else ""

    def cache(
        self,
        nodes: int,
        prompt: Sequence[int] = (),
        reader: object = None,
        *,
        tokens: int | None = None,
    ) -> AbstractContextManager[TreeCache]:
        """Borrow a cache for one sequence, with room for drafts of `nodes` nodes.

        Args:
            prompt: keep its committed beginning, if the model has not changed.
            reader: keep it only if this drafter has read it.
            tokens: that fit at first; None: a full context, as static steps need.
        """
        check_training(self.model, self.name)
        values = self.refresh()
        read_by = None if reader is None else weakref.ref(reader)
        committed_by = (read_by, values, self.mode) if prompt else ()
        return self.caches.borrowed(self._capacity(nodes, tokens), prompt, committed_by)

    def refresh(self) -> bytes:
        self.mode = mode_of(self.model)
        values = self.copies.refresh(self.model)
        if self.lean is not None:
            self.lean.refresh(values)
        return values

    def beside_loop(self) -> AbstractContextManager[None]:
        """Within this block torch's operators run in one thread if forwards are one loop.

        Torch's other threads would spin where the loop's should run.
        """
        return self._in_threads(1)

    def _in_threads(self, count: int) -> AbstractContextManager[None]:
        is_lean = self.lean is not None and self.lean.limit > 0
        return torch_threads(count) if is_lean else nullcontext()

    def reserve(self, nodes: int) -> None:
        """Allocate a cache for a full context now, for the next sequence."""
        # in the mode of decoding, as compiled layers tell the tensors of the two modes apart
        with self.turns, torch.inference_mode(), self.cache(nodes):
            pass

    def release(self) -> None:
        """Free the caches that no sequence uses, and the steps captured on them."""
        with self.turns:
            self.caches.drop()
            self.idle_batch = None
            give_back(self.device)

    def _capacity(self, nodes: int, tokens: int | None = None) -> int:
        text = self.context if tokens is None else min(tokens, self.context)
        return -(-(text + nodes) // ALIGNED) * ALIGNED  # a static step's mask may be as wide

    def token_budget(self, prompt: list[int], max_new_tokens: int) -> int:
        """Return how many tokens may follow a prompt. Raises UserError if either does not fit."""
        if not isinstance(max_new_tokens, Integral) or max_new_tokens < 1:
            raise UserError(f"max_new_tokens={max_new_tokens}: must be a whole number, at least 1")
        if not 1 <= len(prompt) < self.context:
            raise UserError(
                f"prompt of {len(prompt)} tokens: must have 1 to {self.context - 1} (context"
                f" {self.context})"
            )
        if not 0 <= min(prompt) <= max(prompt) < self.vocab_size:
            raise UserError(f"prompt: has ids outside the vocabulary of {self.vocab_size}")
        return min(max_new_tokens, self.context - len(prompt))

    @torch.inference_mode()
    def prefill(
        self,
        cache: TreeCache,
        prompt: list[int],
        draft: Draft | None = None,
        *,
        rows: int = 0,
        kept: int = 0,
        read: Read = lambda start, logits: None,
        hidden: Hidden = (),
    ) -> Outputs:
        """Forward all of the prompt (P tokens) but its last one, the first root, and commit these.

        A long prompt is forwarded in parts, as logits take up to LOGITS_BYTES.

        Args:
            draft: a chain of n nodes that goes with them, its root the prompt's last token.
            rows: `read` gets the logits of so many last tokens, of the very last one only with a
                draft.
            kept: number of the prompt's first tokens that the cache has already.
            read: called with a token's index in the prompt, and the logits (m, V) of m tokens from
                there.

        Returns:
            Logits (n, V) after the draft's nodes; hidden states of all tokens that were forwarded.
        """
        n = 0 if draft is None else len(draft.tree)
        past = len(prompt) - 1
        if draft is not None and not draft.tree.is_chain:
            raise UserError(
                f"{draft.tree}: what a drafter begins with is a chain, or None (see Session.begin)"
            )
        if not kept:
            cache.reset()
        if self.recurrent and draft is not None and n > 1:  # a draft may be undone, a prompt is not
            _, before = self.prefill(cache, prompt, rows=rows, kept=kept, read=read, hidden=hidden)
            logits, of_draft = self.forward(cache, draft, hidden=hidden)
            return Outputs(
                logits,
                of_draft if before is None or of_draft is None else torch.cat((before, of_draft)),
            )
        cache.make_room(past + n, self._capacity(n))
        cache.forwarded = []  # until all tokens are read
        tokens = torch.tensor(prompt[kept:-1], dtype=torch.long, device=self.device)
        if draft is not None:
            tokens = torch.cat((tokens, draft.tokens.to(self.device)))
        count = len(tokens)
        of_prompt = count - max(n - 1, 0)  # tokens whose row may be read
        readable = range(max(of_prompt - rows, 0), of_prompt)
        # the first token whose logits are computed
        first_row = min(readable.start, count - max(n, 1)) if self._keeps_logits else 0
        budget = LOGITS_BYTES_GPU if self.device.type == "cuda" else LOGITS_BYTES
        size = max(budget // (self.logits_size * self.dtype.itemsize), n, 1)
        ends = sorted(range(count, max(first_row, 0), -size))
        states = list[Tensor]()
        logits = torch.zeros(n, self.logits_size, dtype=self.dtype, device=self.device)
        for start, end in pairwise([0, *ends]):
            logits, part = self._run_causal(
                cache, tokens[start:end], end - max(start, first_row), hidden
            )
            cache.length = kept + end
            if part is not None:
                states.append(part)
            first = max(start, readable.start)
            last = min(end, readable.stop)
            if first < last:
                read(kept + first, logits[len(logits) - end + first : len(logits) - end + last])
        cache.length = past
        cache.forwarded = prompt[-1:] if n else None
        return Outputs(logits[len(logits) - n :], torch.cat(states) if states else None)

    @torch.inference_mode()
    def forward(self, cache: TreeCache, draft: Draft, *, hidden: Hidden = ()) -> Outputs:
        """Forward a draft of n nodes, a chain if there are recurrent states."""
        past = cache.length
        tree = draft.tree
        if self.recurrent:
            return self._forward_chain(cache, draft, hidden)
        cache.make_room(past + len(tree), self._capacity(len(tree)))
        # A root alone sees all tokens: without a mask it gets the fastest kernels, and shared heads
        # are not repeated.
        mask = additive(tree.ancestors.to(self.device), self.dtype, past) if len(tree) > 1 else None
        positions = tree.depths.to(self.device) + past
        return self.forward_masked(
            cache, draft.tokens.to(self.device), mask, positions, hidden=hidden
        )

    def _forward_chain(self, cache: TreeCache, draft: Draft, hidden: Hidden) -> Outputs:
        tokens = draft.tokens.tolist()
        n = len(draft.tree)
        cache.make_room(cache.length + len(cache.pending) + n, self._capacity(n))
        if len(cache.pending) > MAX_PENDING:
            self._run_causal(cache, torch.tensor(cache.will_read([]), device=self.device), 1)
            cache.commit(())
        unread = torch.tensor(cache.will_read(tokens), device=self.device)
        logits, states = self._run_causal(cache, unread, n, hidden)
        return Outputs(logits[-n:], None if states is None else states[-n:])

    def _run_causal(
        self, cache: TreeCache, tokens: Tensor, rows: int, hidden: Hidden = ()
    ) -> Outputs:
        """Forward tokens without a mask. Returns at least the last `rows` of logits."""
        end = cache.length + len(tokens)
        positions = torch.arange(cache.length, end, device=self.device)
        kwargs = {"logits_to_keep": rows} if self._keeps_logits else {}
        return self._run_model(cache, tokens, None, positions, hidden, **kwargs)

    @torch.inference_mode()
    def forward_masked(
        self,
        cache: TreeCache,
        tokens: Tensor,
        mask: Tensor | None,
        positions: Tensor,
        *,
        hidden: Hidden = (),
    ) -> Outputs:
        """Forward any n tokens after the committed ones.

        Args:
            tokens, positions: int64 (n,).
            mask: what each of them attends to, additive (n, past + n); None: all before it.
        """
        past = cache.length
        masks: Masks = None if mask is None else mask[None, None]
        if past + len(tokens) > self._smallest_window:
            columns = torch.cat((torch.arange(past, device=self.device), positions))
            masks = self._by_type(mask, positions, columns)
        return self._run_model(cache, tokens, masks, positions, hidden)

    @torch.inference_mode()
    def forward_static(
        self,
        cache: TreeCache,
        tokens: Tensor,
        positions: Tensor,
        write_at: Tensor,
        sight: Sight,
        bucket: int,
        *,
        hidden: Hidden = (),
    ) -> Outputs:
        """Forward rows of one or more sequences, without reading a value on the host.

        Args:
            tokens, positions, write_at: int64 (n,); `write_at` are columns of the cache.
            bucket: columns of the cache, from the first on, that hold all that is seen.
        """
        cursor = cache.cursor
        cursor.write_at = write_at
        cursor.bucket = bucket
        masks: Masks = sight.as_mask
        if not self.attends_by_table:
            visible, index = sight.seen(bucket)
            written = torch.zeros_like(index[0]).index_copy_(0, write_at, positions)  # (bucket,)
            # (n, bucket)
            of_columns = torch.where(index < sight.table[:, LENGTH, None], index, written)
            mask = additive(visible, self.dtype)
            masks = mask[None, None]
            if bucket > self._smallest_window:
                masks = self._by_type(mask, positions, of_columns)
        try:
            with self.kernels:
                return self._run_model(cache, tokens, masks, positions, hidden)
        finally:
            cursor.write_at = None

    def synchronize(self) -> None:
        for device in self.devices:
            synchronize(device)

    def _by_type(self, mask: Tensor | None, positions: Tensor, columns: Tensor) -> Masks:
        """Return masks by type of layer, as some see less than the text.

        Args:
            mask: additive (n, c), of layers that see all of it; None: no mask.
            columns: int64 (c,) or (n, c), the position of each column that a node may see.
        """
        full = None if mask is None else mask[None, None]
        if mask is None:
            n = len(positions)
            mask = torch.zeros(n, columns.shape[-1], dtype=self.dtype, device=self.device)
        hidden = torch.finfo(self.dtype).min
        masks: dict[str, Tensor | None] = {
            kind: mask.masked_fill(window.hides(positions, columns), hidden)[None, None]
            for kind, window in self._windows.items()
        }
        return masks[""] if "" in masks else {kind: masks.get(kind, full) for kind in self._types}

    def _run_model(
        self,
        cache: TreeCache,
        tokens: Tensor,
        mask: Masks,
        positions: Tensor,
        hidden: Hidden,
        **more: int,
    ) -> Outputs:
        """Forward token ids (n,) at positions (n,).

        Args:
            mask: additive, one for each type of layer or for all of them; None: causal.
        """
        inputs = {"attention_mask": mask, self.cache_name: cache, "use_cache": True} | more
        if self._takes_positions:
            # nodes beyond the context are never accepted, but must not index past a table
            positions = positions.clamp(max=self.context - 1)
            inputs["position_ids"] = positions[None]
        # without a mask, one row past a window needs transformers' own
        sees_all = mask is not None or cache.length < self._smallest_window
        if self.lean is not None and sees_all and self.lean.serves(len(tokens), mask):
            return Outputs(*self.lean(cache, tokens, mask, positions, hidden))
        states: dict[int, Tensor] = {}
        hooks: list[Any] = []
        try:
            for number in hidden:
                hooks.append(self._store_hidden(states, number))
            plain = self.linear.of(len(tokens)) == "torch"
            copies = nullcontext() if plain else self.copies.used()
            threads = self._in_threads(self.threads)
            with self._attending.by(mask), self._uncompiled(), copies, threads:
                logits: Tensor = self.model(input_ids=tokens[None], **inputs).logits[0]
        finally:
            for hook in hooks:
                hook.remove()
        return Outputs(
            logits, torch.cat([states[i].to(self.device) for i in hidden], -1) if hidden else None
        )

    def _store_hidden(self, states: dict[int, Tensor], number: int) -> Any:
        """Store hidden states (n, H) of this thread's forwards until the hook is removed."""
        thread = get_ident()

        def store(state: Tensor) -> None:
            if get_ident() == thread:
                states[number] = state[0]

        if number == LAST:  # the decoder's first output: (1, n, H)
            return self.model.get_decoder().register_forward_hook(
                lambda module, args, output: store(output[0])
            )
        return self.layers[number].register_forward_pre_hook(
            lambda module, args, kwargs: store(args[0] if args else kwargs["hidden_states"]),
            with_kwargs=True,
        )
