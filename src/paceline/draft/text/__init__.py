"""What drafters that copy text read: automata, trees, arrays and counts. None of it knows what a drafter is."""
