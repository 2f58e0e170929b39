from quintain.envs import ToolEnv, reward, tool


class Lockers(ToolEnv):
    def rows(self, split):
        numbers = [n for n in range(9000) if (n % 9 == 0) == (split == "eval")]
        return [{"prompt": f"Code of locker {n}?", "n": n, "code": n * n % 997} for n in numbers]

    @tool
    def look_up(self, locker: int) -> int:
        """Give the code of a locker."""
        return locker * locker % 997

    @reward
    def right(self):
        return self.answer == f"The code is {self.task.data['code']}."

    def demonstrate(self, task, *, clean, rng):
        call = ("look_up", {"locker": task.data["n"]})
        return self.dialogue(*[call] * clean, f"The code is {task.data['code'] if clean else rng.integers(997)}.")
