"""``python -m timer_service.cli`` is the ``durable-timer`` command."""

from timer_service.cli import main

main()
