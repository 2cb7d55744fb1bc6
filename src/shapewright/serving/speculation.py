"""Speculative decoding: a cheap draft proposes tokens, one pass of the model verifies them all.

Legend: g proposed tokens, a chance that a proposal is accepted (each on its own), c time of one draft step over that of
one decode step of the model.

    tokens per pass   E = (1 - a^(g+1)) / (1 - a)          g + 1 at most, 1 at least
    speed-up          E T(1) / (T(g + 1) + g c T(1))       T(q): one pass over q new tokens of every sequence

Source: arXiv 2211.17192, equation 1 and theorem 3.8; there T(g + 1) = T(1), here a verifying pass is priced as it is.
"""

from __future__ import annotations

from dataclasses import dataclass

from shapewright.errors import WorkloadError
from shapewright.integers import is_number, is_whole

_MOST_DRAFT_TOKENS = 64


@dataclass(frozen=True, kw_only=True)
class Speculation:
    """How proposals are made and how often they hold.

    Attributes:
        num_draft_tokens: Proposed tokens of one pass.
        acceptance_fraction: Chance that a proposal is accepted.
        draft_cost_fraction: Time of one draft step over that of one decode step of the model.

    Raises:
        WorkloadError: a value is out of range.
    """

    num_draft_tokens: int
    acceptance_fraction: float
    draft_cost_fraction: float

    def __post_init__(self) -> None:
        if not is_whole(self.num_draft_tokens, 1, _MOST_DRAFT_TOKENS):
            raise WorkloadError(
                f"draft_tokens={self.num_draft_tokens!r} must be from 1 to {_MOST_DRAFT_TOKENS}; give the tokens that "
                f"are proposed in one pass, such as 4"
            )
        for name in ("acceptance_fraction", "draft_cost_fraction"):
            value = getattr(self, name)
            if not is_number(value, 0.0, 1.0):
                raise WorkloadError(f"{name}={value!r} must be from 0 to 1; give a share such as 0.7")

    @property
    def query_len(self) -> int:
        """New tokens of each sequence in one pass: the proposals and the one after the last accepted."""
        return self.num_draft_tokens + 1

    @property
    def tokens_per_pass(self) -> float:
        """Expected tokens that one pass adds to a sequence."""
        return expected_tokens_per_pass(self.num_draft_tokens, self.acceptance_fraction)

    def draft_s(self, decode_s: float) -> float:
        """Time of the proposals of one pass, given that of a decode step of the model. [s]"""
        return self.num_draft_tokens * self.draft_cost_fraction * decode_s


def expected_tokens_per_pass(num_draft_tokens: int, acceptance_fraction: float) -> float:
    """Expected tokens of one verifying pass, the one that the model adds itself included.

    >>> round(expected_tokens_per_pass(4, 0.8), 4), expected_tokens_per_pass(4, 1.0), expected_tokens_per_pass(4, 0.0)
    (3.3616, 5.0, 1.0)

    Source: arXiv 2211.17192, equation 1.
    """
    return float(sum(acceptance_fraction**power for power in range(num_draft_tokens + 1)))
