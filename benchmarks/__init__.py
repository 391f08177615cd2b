"""Benchmarks of Durable Timer against the broker's limit and against everyday client code.

`python -m benchmarks.run` starts brokers of its own and prints its tables; `python -m benchmarks.profile`
shows where the service's processor time goes. Figures are meant as ratios within one run: boxes differ and
are noisy.

- `bare` speaks the NATS protocol itself and costs as little as Python allows; limit and load stand on it.
- `limit` asks how many acknowledged messages a second this box can store at all.
- `engine` plays publisher and flow engine; `load` is the scenarios it goes through, the same for everyone.
- `everyday` is the contender to beat: the same life of a timer in the client library's everyday calls.
- `steady` watches a quiet service for twenty minutes; `python -m benchmarks.steady` stands alone.
- `handoff` measures how soon the notify consumer hands off, beside slow flows too; `python -m benchmarks.handoff`.
- `contenders` says how each of them is provisioned, served and known to be ready.
"""
