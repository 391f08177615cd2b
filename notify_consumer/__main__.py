"""``python -m notify_consumer`` is ``notify-consumer``."""

from notify_consumer.cli import main

if __name__ == "__main__":
    main()
