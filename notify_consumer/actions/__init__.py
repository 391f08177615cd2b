"""Timed actions: call a method of yours later, under a name, until it succeeds.

    class OrderTimers(TimedAction):
        name = "order-timers"

        @action("expire")
        async def expire(self, order_id: str) -> Effect:
            await cancel_if_unpaid(order_id)
            return self.effects.done()

    handlers.actions(OrderTimers())                                     # in the notify consumer

    scheduler = TimerScheduler(timers)                                  # anywhere, on a TimerClient
    await scheduler.create_single_timer("expire-o-1", timedelta(hours=1), OrderTimers.expire.deferred("o-1"))
    await scheduler.delete("expire-o-1")                                # paid: nothing will be called

A method that fails, raises or takes too long is called again after 3 s, doubling to 30 s, without end: each wait is a
durable timer like the first. So "nothing to do any more" is ``done()``, not a failure.
"""

from notify_consumer.actions.definition import Deferred, Effect, TimedAction, action, effects
from notify_consumer.actions.scheduler import TimerScheduler
from notify_consumer.actions.testkit import ActionRun, TimedActionTestKit

__all__ = [
    "ActionRun",
    "Deferred",
    "Effect",
    "TimedAction",
    "TimedActionTestKit",
    "TimerScheduler",
    "action",
    "effects",
]
