"""What stands after end tokens, and what copies of it hold."""

import numpy as np

from paceline.draft.base import up_to_ends


def test_a_tree_is_cut_after_end_tokens():
    # 1 -> (2 -> (4 -> 6, 5), 3 -> 4)
    drafted, parent = np.array([2, 3, 4, 5, 4, 6]), np.array([0, 0, 1, 1, 2, 3])
    for ends, left, above in [
        ({9}, [2, 3, 4, 5, 4, 6], [0, 0, 1, 1, 2, 3]),
        ({2}, [2, 3, 4], [0, 0, 2]),
        ({4}, [2, 3, 4, 5, 4], [0, 0, 1, 1, 2]),
        ({2, 3}, [2, 3], [0, 0]),
    ]:
        found = up_to_ends(drafted, parent, frozenset(ends))
        assert [one.tolist() for one in found] == [left, above]
