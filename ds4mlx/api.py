"""The Python API: load a model, generate text, or drive it row by row."""

import re
import resource
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from numbers import Integral, Real
from pathlib import Path

import mlx.core as mx

from . import dspark as asked
from . import preflight
from .cache import Cache
from .chat import render
from .config import TargetConfig
from .draft import Block, Draft, DraftConfig
from .errors import UsageError
from .generate import Speculation, awaited, decode, prefill
from .loading import load_files
from .parse import OutputParser
from .report import DraftReport
from .sampling import Sampler
from .schedule import Schedule
from .target import Target
from .tokenizer import Tokenizer
from .weights import Progress
from .wired import Wired

CHUNK = 512  # tokens of a session's prefill at a time: all of their logits are held
CHAT_TOKENS, COMPLETION_TOKENS = 50_000, 256  # default limits of a reply


def load(
    path: str | Path | None = None,
    *,
    mtp: str | Path | None = None,
    rounding: bool = True,
    ctx: int | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> "Model":
    """The model of a GGUF file (any shard of a split one) or of a folder with `config.json`.

    Without a path: the small model that comes with the package, which completes Python.
    `mtp` is a DSpark draft for `generate(dspark=True)`: a GGUF, a folder with `config.json` and
    `draft*.safetensors`, or "embedded", the draft of the small model.
    `rounding=False` leaves out the simulated fp8/fp4 rounding of keys, values and index (for
    comparison with implementations that have none). `progress(stage, done, total)` is called
    while bytes arrive. Raises UsageError for a path that cannot be meant, FileError for a file
    that is damaged, not complete or a draft that does not fit, and, before a weight is read,
    Ds4Error for a model that does not fit into memory with a context of `ctx` tokens (default
    32,768 or the model's limit); `force` loads it all the same.

    >>> model = ds4mlx.load()
    >>> print(model.generate("def fibonacci(n):", tokens=40).text)
    """
    files = load_files(path, mtp, progress, ctx, force)
    config = TargetConfig.from_dict(files.config, source=files.name).rounded(rounding)
    if files.draft is None:
        return Model(Target(config, files.weights), files.tokenizer, files)
    settings = DraftConfig.from_dict(files.draft.config)
    config = replace(config, dspark_target_layer_ids=settings.dspark_target_layer_ids)
    target = Target(config, files.weights)
    draft = Draft(settings, target, files.draft.weights)
    return Model(target, files.tokenizer, files, draft)


class Model:
    """A target with its tokenizer. Use as a context manager, or `close()`, to free its memory."""

    def __init__(self, target: Target, tokenizer: Tokenizer, files, draft: Draft | None = None):
        self._target, self._draft = target, draft
        self.tokenizer = tokenizer
        self.config = target.config
        self.name, self.release, self.chat = files.name, files.release, files.chat
        self._files = files.draft
        self._warnings = [files.draft.warning] if draft and files.draft.warning else []
        self._plan, self._ctx, self._chunk = files.plan, files.ctx, files.chunk
        self._risks, self._forced = [files.risk] if files.risk else [], files.risk is not None
        self._wired = Wired(files.plan(files.ctx, files.chunk).total, preflight.device())
        self._unwire = weakref.finalize(self, self._wired.release)
        self._schedule = draft and Schedule(draft.config.dspark_block_size)

    def generate(
        self,
        prompt: str | Sequence[dict],
        *,
        system: str | None = None,
        tokens: int | None = None,
        ctx: int | None = None,
        temp: float = 0.0,
        top_p: float = 1.0,
        min_p: float = 0.05,
        seed: int | None = None,
        think: str = "high",
        release: str | None = None,
        raw: bool | None = None,
        prefill_chunk: int | None = None,
        dspark: bool = False,
        dspark_confidence: float | None = None,
        dspark_strict: bool = False,
        exact_sampling: bool = False,
        dspark_schedule: bool = True,
        progress: Progress | None = None,
    ) -> "Reply":
        """A lazy reply to `prompt`: the user's text, or a list of messages (role, content).

        tokens: most tokens to generate (default 50,000; 256 for a completion model). ctx: tokens
        of prompt and reply together (default: that of `load`). temp 0 is greedy;
        otherwise top_p, min_p and seed apply. think: "off", "low", "high" or "max"; release:
        "preview" or "0731", where the file does not tell. prefill_chunk: prompt tokens at a time
        (default: 4096, 2048 or 512, as memory allows). raw: the text's tokens and nothing else
        (no begin token, no roles); a model without chat roles completes the text after a begin
        token.
        dspark: decode with the draft; the text is the same. dspark_confidence (default 0.7, implies
        dspark) is what a draft needs to be verified; 0 verifies whole blocks. dspark_schedule: skip
        drafting while it does not pay, and verify drafts below that threshold, unseen, where it
        takes less time than to wait for confidences. dspark_strict: plain decoding, as a baseline.
        exact_sampling: allow drafts with temp above 0; the text is that of the seed without them.
        Raises UsageError for a value out of range or a prompt that is longer than the context.
        """
        target = self._open()
        _check_ranges(tokens=tokens, ctx=ctx, temp=temp, top_p=top_p, min_p=min_p)
        _check_ranges(prefill_chunk=prefill_chunk, seed=seed)
        confidence = asked.confidence(
            self._draft is not None,
            dspark=dspark,
            dspark_confidence=dspark_confidence,
            dspark_strict=dspark_strict,
            exact_sampling=exact_sampling,
            temp=temp,
        )
        ctx = self._context(ctx)
        chunk = self._rows(ctx, prefill_chunk)
        notes, self._risks = self._risks, []
        ids, parser = self._prompt(prompt, system, think, release, raw, notes)
        if len(ids) >= ctx:
            raise UsageError(
                f"the prompt has {len(ids)} tokens, wanted fewer than the context of {ctx}"
            )
        default = CHAT_TOKENS if parser else COMPLETION_TOKENS
        return Reply(
            target,
            self.tokenizer,
            ids,
            parser=parser,
            sampler=Sampler(temp, top_p, min_p, seed),
            limit=tokens or default,
            ctx=ctx,
            chunk=chunk,
            progress=progress,
            notes=notes,
            drafting=self._drafting(confidence, dspark_schedule, notes),
            memory={
                "planned_bytes": self._plan(ctx, chunk).total,
                "wired_requested_bytes": self._wired.requested,
                "wired_bytes": self._wired.granted,
            },
        )

    def _drafting(self, confidence: float | None, schedule: bool, notes: list[str]) -> dict | None:
        """Keywords of Speculation; None decodes plainly."""
        if confidence is None:
            return None
        notes += self._warnings
        self._warnings = []
        settings = {
            "draft": self._files.name,
            "fingerprint": self._files.fingerprint,
            "block": self._draft.config.dspark_block_size,
            "confidence": confidence,
            "schedule": schedule,
        }
        return {
            "draft": self._draft,
            "confidence": confidence,
            "schedule": self._schedule if schedule else None,
            "report": DraftReport(settings),
        }

    def _prompt(self, prompt, system, think, release, raw, notes):
        """Token ids of the prompt, and the parser of the reply (None: plain completion)."""
        text = isinstance(prompt, str)
        if not text and (not isinstance(prompt, Iterable) or isinstance(prompt, bytes | Mapping)):
            raise UsageError(f"the prompt is {prompt!r:.60}, wanted a text or a list of messages")
        if raw or (raw is None and not self.chat):
            if not text or system:
                what = "a system text" if system else "a list of messages"
                raise UsageError(f"{what} needs chat roles, and this is a plain completion")
            ids = self.tokenizer.encode(prompt)
            if not raw:
                ids = [self.tokenizer.bos, *ids]
            if not ids:
                raise UsageError("the prompt is empty, wanted at least one token")
            return ids, None
        if text and not prompt:
            raise UsageError("the prompt is empty, wanted some text")
        messages = [{"role": "user", "content": prompt}] if text else list(prompt)
        if system:
            messages.insert(0, {"role": "system", "content": system})
        release = release or self.release
        if release is None:
            release = "0731"
            if think in ("high", "max"):
                notes.append("the file does not tell its release: 0731 is assumed (--release)")
        parts = render(messages, think=think, release=release)
        return self.tokenizer.encode_parts(parts), OutputParser(thinking=think != "off")

    def session(self, ctx: int | None = None) -> "Session":
        """Row by row access for research; see Session."""
        return Session(self._open(), self._context(ctx), self._draft)

    def _context(self, ctx: int | None) -> int:
        """The context that was asked for, or that of `load`. Memory is taken for all of it at once.

        Raises UsageError beyond the model's, Ds4Error if memory is too small for more than `load`
        was asked for.
        """
        most = self.config.max_position_embeddings
        ctx = preflight.context(self._ctx if ctx is None else ctx, most)
        if ctx > self._ctx:
            self._require(self._more, ctx)
        return ctx

    def _rows(self, ctx: int, asked: int | None) -> int:
        """Tokens of prefill at a time: those asked for, or the most that fit.

        Raises Ds4Error if memory is too small for those asked for.
        """
        if asked and asked > self._chunk:
            self._require(lambda n: self._more(n, asked), ctx)
        if asked or ctx <= self._ctx:
            return asked or self._chunk
        return preflight.chunk(self._more, ctx, preflight.device())

    def _more(self, *sizes: int) -> preflight.Need:
        """What a run takes beyond the weights, which are there already, and no longer free."""
        return replace(self._plan(*sizes), weights=0, draft=0)

    def _require(self, plan: preflight.Plan, ctx: int):
        risk = preflight.require(self.name, plan, ctx, preflight.device(), self._forced)
        self._risks += [risk] if risk else []

    def close(self):
        """Free the weights. Replies and sessions that are still held keep them alive."""
        self._target = self._draft = None
        mx.clear_cache()
        self._unwire()

    def _open(self) -> Target:
        if self._target is None:
            raise UsageError(f"{self.name}: the model is closed")
        return self._target

    def __enter__(self) -> "Model":
        return self

    def __exit__(self, *_):
        self.close()

    def __repr__(self) -> str:
        config, closed = self.config, ", closed" if self._target is None else ""
        return f"<ds4mlx model {self.name}: {config.num_hidden_layers} layers{closed}>"


class Session:
    """A sequence that grows and shrinks by tokens.

    >>> s = model.session(ctx=1024)
    >>> logits = s.feed(model.tokenizer.encode("import os"))  # [n, vocab] float32
    >>> s.rewind(1)  # forget the last token, exactly
    >>> block = s.propose(anchor)  # with a draft: guesses of what follows the token `anchor`
    """

    def __init__(self, target: Target, ctx: int, draft: Draft | None = None):
        self._target, self._cache = target, Cache(target.config, ctx)
        self._draft, self._context = draft, draft and draft.cache()
        awaited([self._cache.arrays(), self._context.arrays() if draft else []])
        self._torn = False  # in the middle of a chunk
        self.hidden = None  # [n, taps * D] float32 of the last feed: the rows that DSpark reads

    def feed(self, ids: Sequence[int], *, chunk: int = CHUNK) -> mx.array:
        """Process `ids` after the tokens so far -> float32 logits [n, vocab] of these rows.

        Raises UsageError for ids outside the vocabulary, more than the context has room for, a
        `chunk` (tokens at a time) below 1, and after a feed that was interrupted.
        """
        _check_ranges(chunk=chunk or 0)
        self._whole()
        vocab, room = self._target.config.vocab_size, self._cache.ctx - self.position
        for id in ids:
            _check_id(id, vocab)
        if not 0 < len(ids) <= room:
            raise UsageError(f"feed got {len(ids)} tokens, wanted 1 to {room} (context is full)")
        logits, taps = [], []
        drafting = {"draft": self._draft, "context": self._context}
        self._torn = True
        for streams, tap in prefill(self._target, ids, self._cache, chunk=chunk, **drafting):
            logits.append(self._target.logits(streams))
            taps.append(tap)
        self.hidden, found = awaited([mx.concatenate(taps), mx.concatenate(logits)])
        self._torn = False
        return found

    def _whole(self):
        if self._torn:
            raise UsageError("a feed of this session was interrupted, wanted a new session")

    def rewind(self, n: int):
        """Forget the newest `n` tokens (at most 8 behind the furthest), as if never seen."""
        self._whole()
        self._cache.rewind(n)
        if self._draft:
            self._context.rewind(n)

    def propose(self, anchor: int) -> Block:
        """The draft's guesses after the tokens so far and `anchor`; the session stays as it is.

        -> tokens [1 + N] (the anchor first), logits [N, vocab] float32 with the Markov term,
        confidence [N] before the sigmoid.
        """
        if self._draft is None:
            raise UsageError("propose needs a draft, wanted load(.., mtp=FILE)")
        vocab = self._target.config.vocab_size
        _check_id(anchor, vocab)
        if self.position == 0:
            raise UsageError("propose reads the tokens so far, wanted at least one to be fed")
        self._whole()
        block = self._draft.propose(mx.array([anchor], mx.int32), self._context)
        awaited([block.tokens, block.logits, block.confidence])
        return block

    @property
    def position(self) -> int:
        """Tokens processed so far."""
        return self._cache.position


def _check_id(id: int, vocab: int):
    if not isinstance(id, Integral | mx.array) or not 0 <= id < vocab:
        raise UsageError(f"token id {id!r:.60} is outside the vocabulary of {vocab}")


class Piece(str):
    """A stretch of streamed text; `reasoning` tells whether it belongs to the thinking."""

    reasoning: bool = False

    def __new__(cls, text: str, reasoning: bool = False):
        piece = super().__new__(cls, text)
        piece.reasoning = reasoning
        return piece


class Reply:
    """A completion that is computed while it is read, and remembered.

    Iterating gives pieces of text as they come; `text` (the answer), `reasoning`, `tokens` (ids,
    without the stop token), `finish_reason` ("stop", "length", "context", "interrupted") and
    `stats` read it to its end first.
    """

    def __init__(
        self,
        target,
        tokenizer,
        ids,
        *,
        parser,
        sampler,
        limit,
        ctx,
        chunk,
        progress,
        notes,
        drafting=None,
        memory=None,
    ):
        self.notes = notes  # what the user should know about how the prompt was made
        self._pieces, self._tokens, self._reason = [], [], None
        self._stats = {
            "prompt_tokens": len(ids),
            "prompt_seconds": 0.0,
            "first_token_seconds": None,
            "generated_tokens": 0,
            "generate_seconds": 0.0,
            "seed": sampler.seed,
            "ctx": ctx,
            **(memory or {}),
        }
        self._report = drafting and drafting["report"]
        self._run = self._generate(
            target, tokenizer, ids, parser, sampler, limit, ctx, chunk, progress, drafting
        )

    def __iter__(self) -> Iterator[Piece]:
        at = 0
        while True:
            while at < len(self._pieces):
                yield self._pieces[at]
                at += 1
            try:
                piece = next(self._run, None)
            except BaseException:
                self._reason = self._reason or "interrupted"
                raise
            if piece is None:
                return
            self._pieces.append(piece)

    def _generate(
        self, target, tokenizer, ids, parser, sampler, limit, ctx, chunk, progress, drafting
    ):
        stats, start = self._stats, time.perf_counter()
        cache = Cache(target.config, ctx)
        draft = drafting and drafting["draft"]
        context = draft and draft.cache()
        rows = prefill(
            target, ids, cache, chunk=chunk, progress=progress, draft=draft, context=context
        )
        for chunk_streams, _ in rows:
            streams = chunk_streams
        stats["prompt_seconds"] = time.perf_counter() - start
        room = ctx - len(ids)
        stop = tokenizer.stop_ids if parser else {tokenizer.eos}
        stream = tokenizer.stream()
        reason, first = "stop", time.perf_counter()
        if drafting:
            loop = Speculation(
                target=target, cache=cache, context=context, sampler=sampler, stop=stop, **drafting
            )
            ids = loop.decode(streams, min(limit, room))
        else:
            ids = decode(target, streams, cache, sampler, limit=min(limit, room), stop=stop)
        for id in ids:
            now = time.perf_counter()
            self._tokens.append(id)
            stats["first_token_seconds"] = stats["first_token_seconds"] or now - start
            stats["generated_tokens"] = len(self._tokens)
            stats["generate_seconds"] = now - first
            if len(self._tokens) == min(limit, room):
                reason = "length" if limit <= room else "context"
            yield from _pieces(parser, stream, id, tokenizer.is_added(id))
        yield from _pieces(parser, stream)
        if parser:
            yield from (Piece(*part) for part in parser.finish(reason))
        self._reason = reason

    def _finish(self) -> "Reply":
        for _ in self:
            pass
        return self

    @property
    def text(self) -> str:
        return "".join(p for p in self._finish()._pieces if not p.reasoning)

    @property
    def reasoning(self) -> str:
        return "".join(p for p in self._finish()._pieces if p.reasoning)

    @property
    def tokens(self) -> list[int]:
        return list(self._finish()._tokens)

    @property
    def finish_reason(self) -> str | None:
        return self._finish()._reason

    @property
    def stats(self) -> dict:
        """Counts, seconds and tokens per second so far, and the peak of memory in bytes."""
        stats = dict(self._stats)
        for name in ("prompt", "generate"):
            counted = "generated" if name == "generate" else name
            seconds, n = stats.get(f"{name}_seconds"), stats.get(f"{counted}_tokens")
            stats[f"{name}_tokens_per_second"] = n / seconds if seconds else None
        if self._report:
            stats["dspark"] = self._report.summary()
        return stats | {"peak_bytes": peak_bytes(), "finish_reason": self._reason}

    def close(self):
        """Stop generating; what was produced stays."""
        self._run.close()
        self._reason = self._reason or "interrupted"

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        state = self._reason or ("not started" if not self._tokens else "running")
        text = "".join(self._pieces)
        return f"<ds4mlx reply, {len(self._tokens)} tokens, {state}: {text[:200]!r}>"


def _pieces(parser, stream, id: int | None = None, control: bool = True) -> Iterator[Piece]:
    """Text that one token, or the end (None), completes; a control token stands by itself."""
    texts = [(stream.flush(), False)] if control else []
    if id is not None:
        texts.append((stream.push(id), control))
    for text, marker in texts:
        if parser:
            yield from (Piece(*part) for part in parser.push(text, marker))
        elif text:
            yield Piece(text)


def peak_bytes() -> int:
    """The most memory in use so far: MLX's own count on a GPU, else the process's."""
    if mx.default_device() == mx.gpu:
        return mx.get_peak_memory()
    # Linux counts in ru_maxrss what the process had that started this one.
    if (linux := Path("/proc/self/status")).exists():
        return int(re.search(r"VmHWM:\s+(\d+) kB", linux.read_text())[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _check_ranges(**values):
    """Raises UsageError for the first value of another kind or outside its range.

    None means its default.
    """
    ranges = {
        "tokens": (1, None),
        "ctx": (1, None),
        "chunk": (1, None),
        "prefill_chunk": (1, None),
        "temp": (0, 100),
        "top_p": (0, 1),
        "min_p": (0, 1),
        "seed": (0, 2**64 - 1),
    }
    for name, value in values.items():
        low, high = ranges[name]
        real = name in ("temp", "top_p", "min_p")
        fits = isinstance(value, Real if real else Integral) and not isinstance(value, bool)
        if value is None or (fits and value >= low and (high is None or value <= high)):
            continue
        wanted = f"{low} to {high}" if high is not None else f"at least {low}"
        kind = "" if real else "a whole number, "
        raise UsageError(f"{name} is {value!r:.60}, wanted {kind}{wanted}")
