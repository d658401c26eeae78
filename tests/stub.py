"""A model that is a script, in place of the real one, for tests of the command line.

`python -m tests.stub SCRIPT WORDS` runs a command line in a process of its own with one.
"""

import sys
import time

import ds4mlx
from ds4mlx import cli


class Piece(str):
    reasoning = False


class Thought(Piece):
    reasoning = True


class StubReply:
    """Gives `pieces`, then ends for `finish_reason`."""

    notes = ()

    def __init__(self, pieces, finish_reason="stop"):
        self.pieces, self.seen, self.tokens = iter(pieces), [], []
        self.finish_reason, self.closed = finish_reason, False

    def __iter__(self):
        for piece in self.pieces:
            assert not self.closed, "a closed reply goes on"
            self.seen.append(piece)
            self.tokens.append(len(self.tokens))
            yield piece

    def close(self):
        self.closed = True

    @property
    def text(self):
        assert self.closed, "the reply is read before it is closed"
        return "".join(p for p in self.seen if not p.reasoning)

    @property
    def reasoning(self):
        return "".join(p for p in self.seen if p.reasoning)

    @property
    def stats(self):
        n = len(self.tokens)
        return {
            "prompt_tokens": 7,
            "prompt_tokens_per_second": 70.0,
            "first_token_seconds": 0.1 if n else None,
            "generated_tokens": n,
            "generate_tokens_per_second": 20.0 if n else None,
            "peak_bytes": 2 * 10**9,
        }


class StubModel:
    """Stands in for `ds4mlx.load` and for the model; remembers what it was asked."""

    def __init__(self, reply=None):
        self.reply = reply or StubReply([Piece("Hello,"), Piece(" world")])
        self.loads, self.drafts, self.prompts, self.options = [], [], [], []
        self.limits = []

    def load(self, path=None, *, mtp=None, progress, ctx=None, force=False):
        self.loads.append(path)
        self.drafts.append(mtp)
        self.limits.append((ctx, force))
        return self

    def generate(self, prompt, *, progress, **options):
        self.prompts.append(prompt)
        self.options.append(options)
        return self.reply


def endless():
    while True:
        yield Piece("word\n")
        time.sleep(0.01)


def announced():
    """Endless, and tells standard error when it begins."""
    print("begun", file=sys.stderr, flush=True)
    yield from endless()


def stuck():
    """Tells standard error when it begins, and never comes to its first piece."""
    print("begun", file=sys.stderr, flush=True)
    time.sleep(60)
    yield Piece("word\n")


class Loading(StubModel):
    """Takes for ever to load."""

    def load(self, path=None, *, mtp=None, progress, **limits):
        print("loading", flush=True)
        while True:
            progress("load", 1, 2)
            time.sleep(0.01)


if __name__ == "__main__":
    scripts = {
        "hanzi": lambda: [Piece("你好")],
        "endless": endless,
        "announced": announced,
        "stuck": stuck,
    }
    kind, words = sys.argv[1], sys.argv[2:]
    ds4mlx.load = (Loading() if kind == "loading" else StubModel(StubReply(scripts[kind]()))).load
    sys.exit(cli.main(words))
