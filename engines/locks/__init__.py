"""Lock files of the engine environments, and `python -m engines.locks.relock`, which makes them."""
