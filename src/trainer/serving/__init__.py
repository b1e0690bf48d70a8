"""An HTTP API over the scheduler, compatible with clients of OpenAI's API.

`app` receives a request and checks its size and access token, `queries` parses its JSON, and `front` submits it to the
scheduler's thread. `texts` converts generated tokens to text, and `answers` builds the JSON of the response.
"""
