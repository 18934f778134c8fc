"""Has a deployment changed since a day on which it was known to be good?

Where things are: `probes` is the fixed set of questions, `measure` what is measured in their
answers; `sequential` are the tests that decide; `baseline` is the file of a good day; `monitor`
holds what is known so far and its state; `watch` asks, round after round; `replica` sees which
replica answered and `routing` how they are chosen; `passive` reads a server's own `counters`
instead of asking; `publish` tells Prometheus and a webhook.
"""
