"""An HTTP API over the scheduler, compatible with clients of OpenAI's API.

`app` receives a request (routes, limits, tokens), `queries` reads its JSON, and `front` submits it to the scheduler's
thread and passes events to `answers`, which converts tokens to text (`texts`) and JSON.
"""
