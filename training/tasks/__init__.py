"""Tasks whose answers, and the positions that an answer must be read from, are known by construction."""
