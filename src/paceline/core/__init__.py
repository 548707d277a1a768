"""What engine, drafters and target share: trees, segments, requests, sampling, acceptance, rounds."""
