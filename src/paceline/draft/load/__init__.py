"""What load-aware drafting knows: what rounds cost, how drafts fare, and which nodes pay."""
