"""The notify consumer: takes resumes in, hands them to handlers, and feeds back what became of them.

    from notify_consumer import Handlers, Resume, done, fail, retry

    handlers = Handlers()

    @handlers.flow("billing", node="wait_for_payment")
    async def remind(resume: Resume):
        if await paid(resume.payload["invoice"]):
            return done()
        return retry(delay_ms=86_400_000)

``notify-consumer serve --handlers my_module`` runs them. The way of a resume:

    message ──► outbox row ──► ack ──► claim ──► handler ──► answer stored ──► feedback command ──► done
                (consumer.py)          (relay.py, each write fenced by the claim's token)

A resume is handed to its handler at least once; a crash between the handler's end and the storing of its answer
repeats it under the same ``resume_id``. Once an answer is stored, the handler does not see that resume again.
"""

from notify_consumer.actions import Effect, TimedAction, TimerScheduler, action
from notify_consumer.answers import Answer, Done, Fail, Retry, done, fail, retry
from notify_consumer.context import Context
from notify_consumer.handlers import Handlers
from notify_consumer.resume import Resume

__all__ = [
    "Answer",
    "Context",
    "Done",
    "Effect",
    "Fail",
    "Handlers",
    "Resume",
    "Retry",
    "TimedAction",
    "TimerScheduler",
    "action",
    "done",
    "fail",
    "retry",
]
