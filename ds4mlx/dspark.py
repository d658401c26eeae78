"""What may be asked of a draft, checked alike in Python and, before anything loads, in commands."""

from .errors import UsageError

CONFIDENCE = 0.7  # of a draft that is worth a row

NO_DRAFT = (
    "dspark needs a draft, wanted --mtp FILE: DeepSeek-V4-Flash-DSpark-support-0731.gguf fits the "
    "0731 weights (ds4mlx download ds4f-dspark fetches it); the small model has its own, "
    '"embedded"'
)
WARM = (
    "dspark decodes greedily and temp is {}: wanted --temp 0, or --exact-sampling to draw as "
    "without drafts"
)


def confidence(
    has_draft: bool,
    *,
    dspark: bool = False,
    dspark_confidence: float | None = None,
    dspark_strict: bool = False,
    exact_sampling: bool = False,
    temp: float = 0.0,
) -> float | None:
    """The threshold of drafted decoding; None for plain decoding. Raises UsageError."""
    c = dspark_confidence
    if c is not None and (isinstance(c, bool | str) or not 0 <= c <= 1):
        raise UsageError(f"dspark_confidence is {c!r:.60}, wanted a number from 0 to 1")
    if (dspark or c is not None or dspark_strict) and not has_draft:
        raise UsageError(NO_DRAFT)
    if dspark_strict or not (dspark or c is not None):
        return None
    if temp > 0 and not exact_sampling:
        raise UsageError(WARM.format(temp))
    return CONFIDENCE if c is None else float(c)
