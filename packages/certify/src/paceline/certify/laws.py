"""The laws of chance that tests ask for: normal, chi-square, Student's, binomial. The tests compare them with scipy.

They stand here because scipy would be half of an installation that only asks a server. References are to Abramowitz and
Stegun, Handbook of Mathematical Functions, 1964."""

from collections.abc import Callable
from itertools import count
from math import atan, comb, cos, erfc, exp, inf, lgamma, log, pi, sin, sqrt
from statistics import NormalDist

CLOSE = 1e-15  # Further terms are smaller than this share of a sum.


def above(function: Callable[[float], float], goal: float, low: float, high: float) -> float:
    """Where a function that rises from below `goal` at `low` to above it at `high` passes `goal`, by bisection."""
    while (middle := (low + high) / 2) not in (low, high):
        low, high = (middle, high) if function(middle) < goal else (low, middle)
    return low


def normal_tail(x: float) -> float:
    """The probability that a normal variable is above x."""
    return erfc(x / sqrt(2)) / 2


def normal_bound(level: float) -> float:
    """The number that a normal variable is above with probability `level`."""
    return -NormalDist().inv_cdf(level)


def chi_square_tail(x: float, df: float) -> float:
    """The probability that a chi-square variable is above x: the incomplete gamma function Q(df / 2, x / 2)."""
    if x <= 0 or x == inf:
        return float(x <= 0)
    a, x = df / 2, x / 2
    scale = exp(a * log(x) - x - lgamma(a))
    if x < a + 1:  # 6.5.29, the series of 1 - Q
        term = total = 1 / a
        for n in count(1):
            term *= x / (a + n)
            total += term
            if term < CLOSE * total:
                return 1 - scale * total
    # 6.5.31, the continued fraction, by Lentz's method
    b = x + 1 - a
    c, d = inf, 1 / b
    fraction = d
    for n in count(1):
        b += 2
        d = 1 / (n * (a - n) * d + b)
        c = b + n * (a - n) / c
        fraction *= c * d
        if abs(c * d - 1) < CLOSE:
            break
    return scale * fraction


def chi_square_bound(level: float, df: int) -> float:
    """The number that a chi-square variable is above with probability `level`."""
    high = df + 10.0
    while chi_square_tail(high, df) > level:
        high *= 2
    return above(lambda x: -chi_square_tail(x, df), -level, 0.0, high)


def shifted_tail(x: float, df: int, noncentrality: float) -> float:
    """The probability that a noncentral chi-square variable is above x: a mixture of chi-square variables (26.4.25)."""
    if not noncentrality:
        return chi_square_tail(x, df)
    half, reach = noncentrality / 2, 9 * sqrt(noncentrality / 2) + 40
    first = max(0, int(half - reach))
    a, y = df / 2 + first, x / 2
    tail, total = chi_square_tail(x, df + 2 * first), 0.0
    for j in range(first, int(half + reach)):
        total += exp(j * log(half) - half - lgamma(j + 1)) * tail
        tail += exp(a * log(y) - y - lgamma(a + 1)) if y > 0 else 0.0  # Q(a + 1, y), 6.5.21
        a += 1
    return min(1.0, total)


def student_bound(level: float, df: int) -> float:
    """The number that Student's t with `df` degrees of freedom is above with probability `level`, below a half."""
    high = 1.0
    while _student_tail(high, df) > level:
        high *= 2
    return above(lambda t: -_student_tail(t, df), -level, 0.0, high)


def _student_tail(t: float, df: int) -> float:
    angle = atan(t / sqrt(df))  # 26.7.3 and 26.7.4
    odd = df % 2
    term = total = cos(angle) if odd else 1.0
    for n in range(2 + odd, df - 1, 2):
        term *= (n - 1) / n * cos(angle) ** 2
        total += term
    total = 0.0 if df == 1 else total * sin(angle)
    return (1 - (2 / pi * (angle + total) if odd else total)) / 2


def heads_tail(heads: int, tosses: int) -> float:
    """The probability of `heads` or more in so many tosses of a coin."""
    term = comb(tosses, heads) if heads <= tosses else 0
    total = 0
    for k in range(heads, tosses + 1):
        total += term
        term = term * (tosses - k) // (k + 1)
    return total / 2**tosses if tosses < 1000 else exp(log(total) - tosses * log(2)) if total else 0.0
