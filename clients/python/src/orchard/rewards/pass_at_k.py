"""How often k attempts succeed, estimated from n attempts of which c succeeded.

Two different things are called pass^k; each has a name of its own here. Attempts that were excluded do not count in n.
Where k exceeds n, nothing can be said: the result is None, never 0.

Source of pass@k: Chen et al., "Evaluating Large Language Models Trained on Code" (2021).
"""

from __future__ import annotations

from math import comb


def pass_at_k(n: int, c: int, k: int) -> float | None:
    """The chance that at least one of k attempts, drawn from the n without return, succeeded: 1 - C(n-c,k) / C(n,k)."""
    if not _defined(n, c, k):
        return None
    return 1.0 - comb(n - c, k) / comb(n, k)


def pass_power_k(n: int, c: int, k: int) -> float | None:
    """The chance that k independent attempts all succeed at the measured rate: (c / n) ** k."""
    if not _defined(n, c, k):
        return None
    return float((c / n) ** k)


def pass_all_of_k(n: int, c: int, k: int) -> float | None:
    """The chance that k attempts, drawn from the n without return, all succeeded: C(c, k) / C(n, k)."""
    if not _defined(n, c, k):
        return None
    return comb(c, k) / comb(n, k)


def all_trials_pass(n: int, c: int) -> bool | None:
    """Whether every attempt succeeded."""
    return c == n if _defined(n, c, 1) else None


def _defined(n: int, c: int, k: int) -> bool:
    if not 0 <= c <= n:
        raise ValueError(f"c must lie between 0 and n = {n}, not at {c}")
    if k < 1:
        raise ValueError(f"k must be at least 1, not {k}")
    return k <= n
