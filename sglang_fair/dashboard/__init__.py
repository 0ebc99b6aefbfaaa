"""What operators watch: `sglang-fair dashboard`, a page, and `sglang-fair top`, the same on a terminal.

poller    asks the gateway and the replicas, every two seconds, however many people look
reading   what one look at the cluster found
model     pure: turns readings into what is shown (`view`), with `gains`, `shares` and `history`
server    serves the page in `page/`; `top` draws on a terminal
"""
