"""Indexes of text for drafters that copy: automata, trees, arrays and counts. They know no drafter."""
