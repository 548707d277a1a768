"""Support for measurements: folders that resume, facts of the machine, statistics of chance, and reports."""
