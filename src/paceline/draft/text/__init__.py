"""What copying drafters read: automata, trees, arrays and counts. None of it knows what a drafter is."""
