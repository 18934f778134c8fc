"""Has a deployment changed since a day on which it was known to be good?

Where things are: `probes` is the fixed set of questions and what is measured in an answer;
`sequential` are the tests that decide; `baseline` is the file of a good day; `monitor` holds what
is known so far and its state; `watch` asks, round after round; `replica` sees which replica
answered; `passive` reads a server's own counters instead of asking; `publish` tells Prometheus
and a webhook.
"""
