"""The laws of chance, against scipy's."""

import pytest
from scipy.stats import binom, chi2, ncx2, norm
from scipy.stats import t as student

from paceline.certify import laws

LEVELS = (0.4, 0.05, 1e-3, 1e-6, 1e-12)


@pytest.mark.parametrize("df", [1, 2, 3, 7, 30, 101, 600])
def test_chi_square(df):
    for x in (0.0, 1e-3, 0.5, 1.0, df - 0.5, df, df + 1, 2 * df, 5 * df + 40, 900.0):
        assert laws.chi_square_tail(x, df) == pytest.approx(chi2.sf(x, df), rel=1e-9, abs=1e-300)
        for noncentrality in (0.0, 1e-3, 0.7, 12.0, 300.0, 5000.0):
            expected = float(ncx2.sf(x, df, noncentrality))
            assert laws.shifted_tail(x, df, noncentrality) == pytest.approx(expected, rel=1e-7, abs=1e-12)
    for level in LEVELS:
        assert laws.chi_square_bound(level, df) == pytest.approx(chi2.isf(level, df), rel=1e-10)
    assert laws.chi_square_tail(float("inf"), df) == 0.0


def test_normal_and_student():
    for level in LEVELS:
        assert laws.normal_bound(level) == pytest.approx(norm.isf(level), rel=1e-9)
        assert laws.normal_tail(norm.isf(level)) == pytest.approx(level, rel=1e-9)
        for df in (1, 2, 3, 11, 12, 200):
            if level >= 1e-6:
                assert laws.student_bound(level, df) == pytest.approx(student.isf(level, df), rel=1e-6)


@pytest.mark.parametrize(("heads", "tosses"), [(0, 5), (1, 1), (3, 5), (6, 5), (40, 50), (700, 1200), (1200, 1200)])
def test_heads(heads, tosses):
    assert laws.heads_tail(heads, tosses) == pytest.approx(binom.sf(heads - 1, tosses, 0.5), rel=1e-9, abs=1e-300)
