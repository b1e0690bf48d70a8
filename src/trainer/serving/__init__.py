"""An HTTP API over the scheduler, as clients of OpenAI's API use it.

A request goes from `app` (routes, limits, tokens) through `queries` (its JSON) to `front`, which submits it to the
thread of the scheduler and hands events on to `answers`, where tokens become text (`texts`) and JSON.
"""
