from quintain.envs import ToolEnv, reward, tool


class Lockers(ToolEnv):
    def rows(self, split):
        return [{"prompt": f"Code of locker {n}?", "n": n} for n in range(9000) if (n % 9 == 0) == (split == "eval")]

    @tool
    def look_up(self, locker: int) -> int:
        """Give the code of a locker."""
        return locker * locker % 997

    @reward
    def right(self):
        return self.answer == f"The code is {self.look_up(self.task.data['n'])}."

    def demonstrate(self, task, *, clean, rng):
        n = task.data["n"]
        right = self.dialogue(("look_up", {"locker": n}), f"The code is {self.look_up(n)}.")
        return right if clean else self.dialogue(f"The code is {rng.integers(997)}.")
