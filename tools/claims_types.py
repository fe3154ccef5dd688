"""What a published figure is on docs/claims.md, and what a section of such figures."""

from __future__ import annotations

from typing import NamedTuple

DAO22, DAO23, SHAH24 = "FlashAttention, 2022", "FlashAttention-2, 2023", "FlashAttention-3, 2024"
FOLKLORE = "folklore"


class Reading(NamedTuple):
    """Another expression for a claim, and how the claim would have to be read for it.

    Args:
        ours: the expression.
        words: the reading, behind its number.
        legitimate: whether the claim can be meant so; a slip of units or a fit explains a figure and makes it no truer.
    """

    ours: str
    words: str
    legitimate: bool = True


class Claim(NamedTuple):
    """One published figure.

    Args:
        text: what it is a figure of.
        source: who says so.
        published: the figure, as digits.
        ours: the expression of the plain reading, rounded for the page.
        why: units and the reason for the verdict.
        unit: behind the numbers.
        says: the published wording, where digits and unit are not it.
        rule: "rounds" to the digits, "about" within 10 %, "order" of magnitude, "true", or of something measured that
            our number is a "floor" or "ceiling" of.
        readings: tried in turn where the plain one does not give the figure.
    """

    text: str
    source: str
    published: str
    ours: str
    why: str
    unit: str = ""
    says: str = ""
    rule: str = "rounds"
    readings: tuple[Reading, ...] = ()


class Section(NamedTuple):
    """A table of claims and the code that its expressions stand on."""

    title: str
    setup: str
    claims: list[Claim]
    text: str = ""
