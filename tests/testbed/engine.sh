#!/bin/bash
# A real Docker engine for tests, where there is none: Debian/Ubuntu, root, no systemd and no registry needed.
#   engine.sh start    use the engine that already answers (DOCKER_HOST or the default socket); else install docker.io by
#                      apt if it is missing, start a private dockerd if it is not running, and wait until it answers
#   engine.sh env      print `export DOCKER_HOST=...` for that engine
#   engine.sh status   exit 0 where it answers, 3 where not
#   engine.sh stop     end the private engine, and only that one, by its pid; not while another caller of `start` lives
# The private one has its own socket, data, exec root, pid file and cgroup parent, and never touches another dockerd.
# Several side by side: QUINTAIN_TEST_ENGINE_PRIVATE=1 (use no engine that answers already) and, for each, its own
# QUINTAIN_TEST_ENGINE_ROOT (data) and QUINTAIN_TEST_ENGINE_RUN (socket, pid file); `purge` is `stop` and no data left.
# QUINTAIN_TEST_ENGINE_OPTIONS: more options for dockerd (`--config-file F` for other runtimes, say).
set -euo pipefail
ROOT=${QUINTAIN_TEST_ENGINE_ROOT:-/var/lib/quintain-test}
RUN=${QUINTAIN_TEST_ENGINE_RUN:-/run/quintain-test} # keep short: a unix socket path holds 107 bytes
SOCK=$RUN/docker.sock PIDF=$RUN/docker.pid LOG=$ROOT/dockerd.log
CGROUP=/$(basename "$RUN")
GIVEN=${DOCKER_HOST:-}
export PATH=/usr/local/sbin:/usr/sbin:/sbin:/usr/local/bin:/usr/bin:/bin:$PATH

say() { echo "[engine] $*" >&2; }
api() { # address, method, path: one call to the engine there, without any client; the body on stdout
  python3 -I -S - "$@" <<'PYTHON'
import http.client, socket, sys, urllib.parse
url, method, path = sys.argv[1:]
parts = urllib.parse.urlsplit(url)
connection = http.client.HTTPConnection(parts.hostname or "docker", parts.port or 2375, timeout=5)
if parts.scheme == "unix":
    connection.sock = socket.socket(socket.AF_UNIX)
    connection.sock.settimeout(5)
    connection.sock.connect(parts.path)
connection.request(method, path)
response = connection.getresponse()
print(response.read().decode())
sys.exit(response.status >= 300)
PYTHON
}
answers() { api "${1:-unix:///var/run/docker.sock}" GET /_ping >/dev/null 2>&1; } # empty = the default socket
given_answers() { [ -z "${QUINTAIN_TEST_ENGINE_PRIVATE:-}" ] && [ "$GIVEN" != "unix://$SOCK" ] && answers "$GIVEN"; }
mine() { # is pid $1 alive, and does its command line hold $2?
  [ -n "${1:-}" ] && [ -r "/proc/$1/cmdline" ] && tr '\0' ' ' <"/proc/$1/cmdline" 2>/dev/null | grep -qF -- "$2"
}
pid_of() { cat "$1" 2>/dev/null || true; }
gone() { # wait until pid $1 (whose command line holds $3) has ended, at most $2 seconds
  local i
  for ((i = 0; i < $2 * 20; i++)); do
    mine "$1" "$3" || return 0
    sleep 0.05
  done
  return 1
}
end_pid() { # pid, text in its command line, patience in seconds
  mine "$1" "$2" || return 0
  kill -TERM "$1" 2>/dev/null || true
  gone "$1" "$3" "$2" || { kill -KILL "$1" 2>/dev/null || true; gone "$1" 5 "$2" || true; }
}
started() { sed 's/.*) //' "/proc/$1/stat" 2>/dev/null | cut -d' ' -f20; }
used_by_others() { # does a process that called `start`, other than our caller, still live?
  local file pid
  for file in "$RUN"/users/*; do
    [ -e "$file" ] || continue
    pid=$(basename "$file") pid=${pid%%.*}
    if [ "$(basename "$file")" != "$pid.$(started "$pid")" ]; then rm -f "$file"; elif [ "$pid" != "$PPID" ]; then return 0; fi
  done
  return 1
}
apt_install() { # the dpkg lock may be held; package lists are refreshed only where needed
  local options=(-y -qq --no-install-recommends -o DPkg::Lock::Timeout=180 -o Acquire::Retries=3)
  export DEBIAN_FRONTEND=noninteractive
  apt-get install "${options[@]}" "$@" >>"$LOG.apt" 2>&1 && return
  apt-get update -qq -o Acquire::Retries=3 >>"$LOG.apt" 2>&1 || true # one broken third-party list must not stop us
  apt-get install "${options[@]}" "$@" >>"$LOG.apt" 2>&1 || { tail -20 "$LOG.apt" >&2; say "apt-get install $* failed"; return 1; }
}
have_engine() {
  local binary
  for binary in dockerd containerd containerd-shim-runc-v2 runc; do command -v $binary >/dev/null || return 1; done
}
install() {
  have_engine && return
  [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null || {
    say "no Docker engine answers, and installing one needs root on Debian or Ubuntu; start an engine and set DOCKER_HOST"
    exit 4
  }
  say "installing docker.io"
  apt_install docker.io
  have_engine
}
launch() {
  local containerd pid i
  # A dockerd that was killed leaves its containerd as a zombie for 1-2 s; a new dockerd that finds that pid in
  # containerd.pid takes it for alive, starts none, and fails after 15 s.
  containerd=$(pid_of "$RUN/exec/containerd/containerd.pid")
  mine "$containerd" "$RUN/exec" && { gone "$containerd" 3 "$RUN/exec" || end_pid "$containerd" "$RUN/exec" 5; }
  rm -f "$RUN/exec/containerd/containerd.pid"
  mine "$(pid_of "$PIDF")" "$PIDF" || rm -f "$PIDF" "$SOCK"
  setsid nohup dockerd -H "unix://$SOCK" --data-root "$ROOT/data" --exec-root "$RUN/exec" --pidfile "$PIDF" \
    --storage-driver overlay2 --exec-opt native.cgroupdriver=cgroupfs --cgroup-parent "$CGROUP" \
    --bridge=none --iptables=false --ip6tables=false --ip-forward=false --ip-masq=false \
    --log-opt max-size=1m --log-opt max-file=1 --shutdown-timeout 3 --log-level warn \
    ${QUINTAIN_TEST_ENGINE_OPTIONS:-} \
    </dev/null >>"$LOG" 2>&1 9>&- &
  pid=$!
  for ((i = 0; i < 600; i++)); do
    answers "unix://$SOCK" && return 0
    kill -0 $pid 2>/dev/null || return 1
    sleep 0.05
  done
  say "dockerd (pid $pid) did not answer in 30 s"
  kill -TERM $pid 2>/dev/null || true
  return 1
}
start() {
  if given_answers; then say "an engine answers already: ${GIVEN:-the default socket}"; return; fi
  mkdir -p "$ROOT" "$RUN" 2>/dev/null || { say "no Docker engine answers, and starting one needs root"; exit 4; }
  exec 9>"$RUN/lock"
  flock -w 300 9 # two starts at once: the second finds it running
  mkdir -p "$RUN/users"
  : >"$RUN/users/$PPID.$(started "$PPID")"
  install
  if answers "unix://$SOCK"; then
    say "already running, pid $(pid_of "$PIDF")"
  else
    launch || { say "first start failed, trying once more"; tail -3 "$LOG" >&2; sleep 2; launch; } || { tail -20 "$LOG" >&2; exit 1; }
    say "ready, pid $(pid_of "$PIDF")"
  fi
  exec 9>&-
}
stop() {
  local pid containerd container process file
  [ -d "$RUN" ] || return 0
  exec 9>"$RUN/lock"
  flock -w 300 9
  if used_by_others; then say "left running: others use it"; return; fi
  pid=$(pid_of "$PIDF") containerd=$(pid_of "$RUN/exec/containerd/containerd.pid")
  if mine "$pid" "$PIDF"; then
    # a container whose PID 1 ignores SIGTERM would cost 10 s
    for container in $(api "unix://$SOCK" GET /containers/json 2>/dev/null | grep -o '"Id":"[0-9a-f]*"' | cut -d'"' -f4); do
      api "unix://$SOCK" POST "/containers/$container/kill" >/dev/null 2>&1 || true
    done
    end_pid "$pid" "$PIDF" 30
  fi
  end_pid "$containerd" "$RUN/exec" 5
  # what a killed daemon left: init processes and shims of this exec root only, by pid
  for file in "$RUN"/exec/containerd/daemon/io.containerd.runtime.v2.task/moby/*/init.pid; do
    [ -e "$file" ] || continue
    process=$(cat "$file")
    if grep -qs "$CGROUP/" "/proc/$process/cgroup"; then kill -KILL "$process" 2>/dev/null || true; fi
  done
  for process in /proc/[0-9]*; do
    process=${process#/proc/}
    if mine "$process" "containerd-shim" && mine "$process" "$RUN/exec/"; then kill -KILL "$process" 2>/dev/null || true; fi
  done
  awk -v a="$ROOT/data" -v b="$RUN/exec/" '$5 == a || index($5, a "/") == 1 || index($5, b) == 1 {print $5}' /proc/self/mountinfo |
    sort -r | while read -r mount; do umount -l "$mount" 2>/dev/null || true; done
  rm -f "$PIDF" "$SOCK" "$RUN/exec/containerd/containerd.pid"
  say "stopped"
}
purge() {
  stop
  mine "$(pid_of "$PIDF")" "$PIDF" || rm -rf --one-file-system "$ROOT" "$RUN"
}
case ${1:-} in
start) start ;;
stop) stop ;;
purge) purge ;;
status) if given_answers || answers "unix://$SOCK"; then say "running"; else say "not running"; exit 3; fi ;;
env)
  if given_answers; then
    if [ -n "$GIVEN" ]; then echo "export DOCKER_HOST=$GIVEN"; else echo "export DOCKER_HOST=unix:///var/run/docker.sock"; fi
  else echo "export DOCKER_HOST=unix://$SOCK"; fi ;;
*) sed -n '2,11p' "$0" >&2; exit 2 ;;
esac
