"""Text as bytes: training batches in a fixed order, and held-out windows."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from shapewright.core.errors import BenchError, short_path
from shapewright.core.files import open_file
from shapewright.core.texts import with_fields

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Tokens = NDArray[np.uint8]

VOCAB_SIZE = 256  # of bytes
# One block of the text in so many is held out, so that held-out text is of the same kind as the text trained on.
_HOLD_OUT_EVERY = 32
_BLOCK_BYTES = 2**16
_DIGEST_DIGITS = 16


class ByteText:
    """Text whose tokens are its bytes, in windows of one sequence each.

    Args:
        tokens: The bytes.

    >>> text = ByteText(np.arange(100_000, dtype=np.uint8))
    >>> text.batch(0, seed=0, batch_size=2, seq_len=4).shape
    (2, 5)
    """

    def __init__(self, tokens: Tokens) -> None:
        self._tokens = tokens
        self.num_bytes = int(tokens.size)
        self.digest = hashlib.sha256(tokens.tobytes()).hexdigest()[:_DIGEST_DIGITS]
        self._windows = lru_cache(maxsize=4)(self._split_windows)
        self._order = lru_cache(maxsize=2)(self._shuffle)

    def batch(self, step: int, *, seed: int, batch_size: int, seq_len: int) -> Tokens:
        """Tokens of one training step, of shape (batch_size, seq_len + 1); equal for all models.

        Each epoch visits every window once, in an order that depends on the seed and the epoch alone.
        """
        num_windows = self.num_windows(seq_len)
        places = np.arange(step * batch_size, (step + 1) * batch_size)
        starts = [self._order(seed, int(place // num_windows), seq_len)[place % num_windows] for place in places]
        return self._take(np.array(starts), seq_len)

    def held_out(self, num_tokens: int, seq_len: int) -> Tokens:
        """Windows of held-out text with about so many tokens (at most all), of shape (windows, seq_len + 1)."""
        starts = self._windows(seq_len)[1]
        count = min(max(1, num_tokens // seq_len), starts.size)
        return self._take(starts[np.linspace(0, starts.size - 1, count).astype(np.int64)], seq_len)

    def num_windows(self, seq_len: int) -> int:
        """Windows of one epoch.

        Raises:
            BenchError: the text is too short to train on and to hold a part of it out.
        """
        trained, held_out = self._windows(seq_len)
        if not (trained.size and held_out.size):
            raise BenchError(
                f"the text has {self.num_bytes:,} bytes, too few for windows of seq_len={seq_len} and held-out text",
                advice=with_fields("give more text or a shorter {seq_len}"),
            )
        return int(trained.size)

    def _split_windows(self, seq_len: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """First positions of the windows for training, and of those held out."""
        starts = np.arange(0, self.num_bytes - seq_len, seq_len, dtype=np.int64)
        # Smaller texts have smaller blocks, so that some of them are held out.
        block_bytes = max(1, min(_BLOCK_BYTES, self.num_bytes // (4 * _HOLD_OUT_EVERY)))
        first, last = ((starts + end) // block_bytes % _HOLD_OUT_EVERY for end in (0, seq_len))
        is_held_out, touches = first == _HOLD_OUT_EVERY - 1, last == _HOLD_OUT_EVERY - 1
        return starts[~is_held_out & ~touches], starts[is_held_out & touches]

    def _shuffle(self, seed: int, epoch: int, seq_len: int) -> NDArray[np.int64]:
        return np.random.default_rng((seed, epoch)).permutation(self._windows(seq_len)[0])

    def _take(self, starts: NDArray[np.int64], seq_len: int) -> Tokens:
        found: Tokens = self._tokens[starts[:, None] + np.arange(seq_len + 1)]
        return found


def read_text(paths: Sequence[str | Path]) -> ByteText:
    """Read files as one text, in the order given; folders are replaced by their files, sorted.

    Raises:
        BenchError: a file cannot be read, or there is no text.
    """
    parts = []
    try:
        for given in map(Path, paths):
            files = sorted(path for path in given.rglob("*") if path.is_file()) if given.is_dir() else [given]
            for path in files:
                with open_file(path) as file:
                    parts.append(np.frombuffer(file.read(), dtype=np.uint8))
    except (OSError, ValueError) as error:
        raise BenchError(
            f"cannot read text {short_path(getattr(error, 'filename', None) or given)}: "
            f"{getattr(error, 'strerror', None) or error}; give text files or folders of them"
        ) from error
    tokens = np.concatenate(parts) if parts else np.empty(0, np.uint8)
    if not tokens.size:
        raise BenchError("the text is empty; give files with text")
    return ByteText(tokens)
