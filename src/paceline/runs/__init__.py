"""What a measurement leaves: folders that resume, the machine that it ran on, chance, and reports."""
