"""Signs of life of the connections between workers and servers. No torch."""

#: of silence, after which either end gives one
BEAT_SECONDS = 1.0
#: of silence, after which the other end can be taken for dead at the earliest
LEAST_TIMEOUT_SECONDS = 3 * BEAT_SECONDS
