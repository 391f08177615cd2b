"""The only place that talks to NATS: names, policies, publishing and consuming."""
