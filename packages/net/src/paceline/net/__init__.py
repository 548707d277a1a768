"""Ask servers: the HTTP client, endpoints, servers' own facts and counters, and keys."""
